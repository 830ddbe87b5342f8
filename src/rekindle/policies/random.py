"""Evict a random candidate: the baseline that shows how much a score helps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import final

from rekindle import _checks as checks
from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate, Chooser, Policy


@final
@dataclass(frozen=True, slots=True)
class Random(Policy):
    """Evict a storage at random. The same seed gives the same choices.

    Args:
        seed: The seed.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        checks.number(self.seed, 0, "rekindle.policies.Random({})", "0")

    def bind(self) -> Chooser:
        return _RandomChooser(random.Random(self.seed))


@final
class _RandomChooser(Chooser):
    """Choose at random from a pool of all candidates for eviction."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pool: dict[Candidate, None] = {}

    def add(self, storage: Candidate) -> None:
        self._pool[storage] = None

    def remove(self, storage: Candidate) -> None:
        del self._pool[storage]

    def choose(self, now: Nanoseconds) -> Candidate | None:
        return self._rng.choice(list(self._pool)) if self._pool else None
