"""Largest first: the score is 1 / m(s), as in GreedyRemat (Kumar et al., NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Nothing
from rekindle.policies._scored import ScoredChooser


@final
@dataclass(frozen=True, slots=True)
class Largest(Policy):
    """Evict the largest storage."""

    def bind(self) -> Chooser:
        return ScoredChooser(Nothing(), by_size=True, by_staleness=False)
