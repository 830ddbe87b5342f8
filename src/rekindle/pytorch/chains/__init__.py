"""`rekindle.sequential`: a model that is a chain, its stages run by a schedule of Rotor's."""

from rekindle.pytorch.chains._chained import Chained as Chained
from rekindle.pytorch.chains._chained import is_chain as is_chain
from rekindle.pytorch.chains._chained import total as total
