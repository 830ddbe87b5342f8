"""Let the ranks of a process group agree on one budget, and end together when one fails."""

from rekindle.pytorch.distributed._common import common_budget as common_budget
from rekindle.pytorch.distributed._guard import guard as guard
from rekindle.pytorch.distributed._vote import agree as agree
