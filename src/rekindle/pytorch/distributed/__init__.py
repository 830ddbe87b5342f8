"""What ranks of a process group have to agree on: how much memory, and when it is over."""

from rekindle.pytorch.distributed._common import common_budget as common_budget
from rekindle.pytorch.distributed._guard import guard as guard
from rekindle.pytorch.distributed._vote import agree as agree
