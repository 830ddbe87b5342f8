"""Training in several processes: one budget for all of them, and one end for all of them."""

from rekindle.pytorch.distributed import common_budget as common_budget
from rekindle.pytorch.distributed import guard as guard

__all__ = ["common_budget", "guard"]
