"""Least recently used: the score is 1 / staleness(s), as in caches and virtual memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.policies._base import Chooser, Policy
from rekindle.policies._neighborhood import Nothing
from rekindle.policies._scored import ScoredChooser


@final
@dataclass(frozen=True, slots=True)
class LRU(Policy):
    """Evict the storage that has not been used for the longest time."""

    def bind(self) -> Chooser:
        return ScoredChooser(Nothing(), by_size=False, by_staleness=True)
