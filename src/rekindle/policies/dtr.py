"""The heuristic of the DTR paper: evict what is cheap to recompute, large, and long unused.

    h_DTR(s) = (c0(s) + cost of e*(s)) / (m(s) * staleness(s))

Source: Dynamic Tensor Rematerialization, Kirisame et al., ICLR 2021 (arXiv 2006.09616), section
4.1. The storage with the lowest score is evicted. c0(s) is the cost of the operator that made s,
m(s) its size, and staleness(s) the time since its last access. e*(s) is its evicted neighborhood:
the evicted storages that must be recomputed to recompute s, and those that need s.

The option `neighborhood` selects how the cost of e*(s) counts: "exact" in full (h_DTR), "classes"
estimated by union-find (h_DTR^eq), "local" not at all (h_DTR^local).
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
