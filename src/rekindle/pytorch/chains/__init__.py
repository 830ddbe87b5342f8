"""`rekindle.sequential`: run a model that is a chain of stages by a schedule from Rotor."""

from rekindle.pytorch.chains._chained import Chained as Chained
from rekindle.pytorch.chains._chained import is_chain as is_chain
from rekindle.pytorch.chains._chained import total as total
