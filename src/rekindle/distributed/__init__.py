"""Training in several processes: one budget for all of them, a larger one, one end."""

from rekindle.pytorch.distributed import agree as agree
from rekindle.pytorch.distributed import common_budget as common_budget
from rekindle.pytorch.distributed import guard as guard

__all__ = ["agree", "common_budget", "guard"]
