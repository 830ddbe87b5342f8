"""h_DTR = c(e*(s)) / (m(s) * staleness(s)): Dynamic Tensor Rematerialization, section 4.1.

Kirisame et al., ICLR 2021 (arXiv 2006.09616). The numerator is the cost of the storage and of its
evicted neighborhood; `neighborhood` chooses how that is known:

exact: in full (h_DTR). classes: by union-find (h_DTR^eq). local: the storage alone (h_DTR^local).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from rekindle import _checks as checks
from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Classes, Exact, Local
from rekindle.policies._scored import ScoredChooser

NEIGHBORHOODS = {"exact": Exact, "classes": Classes, "local": Local}


@final
@dataclass(frozen=True, slots=True)
class DTR(Policy):
    """Evict what is cheap to recompute, large, and long unused: the heuristic of the DTR paper.

    Args:
        neighborhood: How evicted neighbors count. "exact": in full. "classes": approximately, by
            union-find. "local": not at all.
    """

    neighborhood: Literal["exact", "classes", "local"] = "exact"

    def __post_init__(self) -> None:
        checks.one_of(self.neighborhood, tuple(NEIGHBORHOODS), "rekindle.policies.DTR({})")

    def bind(self) -> Chooser:
        neighborhood = NEIGHBORHOODS[self.neighborhood]()
        return ScoredChooser(neighborhood, by_size=True, by_staleness=True)
