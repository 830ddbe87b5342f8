"""The ablation family h(s, m, c) of the DTR paper (appendix D.1): each factor is on or off.

The factors are the staleness s, the memory m and the cost c of a storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from rekindle import _checks as checks
from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Classes, Exact, Local, Nothing
from rekindle.policies._scored import ScoredChooser

COSTS = {"exact": Exact, "classes": Classes, "local": Local, "none": Nothing}


@final
@dataclass(frozen=True, slots=True)
class Ablation(Policy):
    """Evict by cost / bytes / staleness, with each factor switched on or off.

    Args:
        staleness: Divide by the time since the last access.
        size: Divide by the size in bytes.
        cost: The numerator. "exact": with the evicted neighborhood. "classes": the same, estimated
            by union-find. "local": only the storage's own cost. "none": 1.
    """

    staleness: bool
    size: bool
    cost: Literal["exact", "classes", "local", "none"]

    def __post_init__(self) -> None:
        checks.one_of(self.cost, tuple(COSTS), "rekindle.policies.Ablation(..., cost={})")

    def bind(self) -> Chooser:
        return ScoredChooser(COSTS[self.cost](), by_size=self.size, by_staleness=self.staleness)
