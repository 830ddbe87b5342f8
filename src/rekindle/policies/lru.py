"""Least recently used: 1 / staleness(s), the policy of caches and pagers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Nothing
from rekindle.policies._scored import ScoredChooser


@final
@dataclass(frozen=True, slots=True)
class LRU(Policy):
    """Evict what has not been used for longest."""

    def bind(self) -> Chooser:
        return ScoredChooser(Nothing(), by_size=False, by_staleness=True)
