"""Training in several processes: one budget for all ranks, and one end for all ranks.

`common_budget` chooses one budget for all ranks, `agree` raises it between steps, and `guard` ends
all ranks when one of them fails. The code is in `rekindle.pytorch.distributed`.
"""

from rekindle._public import publish
from rekindle.pytorch.distributed import agree as agree
from rekindle.pytorch.distributed import common_budget as common_budget
from rekindle.pytorch.distributed import guard as guard

__all__ = ["agree", "common_budget", "guard"]
publish(__name__, [agree, common_budget, guard])
