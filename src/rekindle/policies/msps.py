"""MSPS: memory saved per second of recomputation, from Capuchin (Peng et al., ASPLOS 2020).

The score is the inverse, because the candidate with the lowest score is evicted: the time to
recompute a storage and its evicted ancestors, divided by its bytes. It ignores staleness and
evicted descendants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Exact
from rekindle.policies._scored import ScoredChooser


@final
@dataclass(frozen=True, slots=True)
class MSPS(Policy):
    """Evict the storage that frees most bytes per second of recomputation."""

    def bind(self) -> Chooser:
        return ScoredChooser(Exact(counted="ancestors"), by_size=True, by_staleness=False)
