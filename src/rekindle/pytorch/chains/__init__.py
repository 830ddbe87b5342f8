"""Run an `nn.Sequential` by a schedule of the planner Rotor (`rekindle.sequential`)."""

from rekindle.pytorch.chains._chained import Chained as Chained
from rekindle.pytorch.chains._chained import is_chain as is_chain
from rekindle.pytorch.chains._chained import total as total
