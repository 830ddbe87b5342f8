"""Eviction policies as a user of Rekindle may write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from rekindle.policies import Candidate, Chooser, Policy


class CheapestChooser(Chooser):
    """The chooser of `docs/how-to/extend.md`, here with the parents and children of a storage."""

    def __init__(self) -> None:
        self.candidates: dict[Candidate, None] = {}
        self.gone: set[Candidate] = set()

    def add(self, storage: Candidate) -> None:
        assert storage not in self.candidates
        self.candidates[storage] = None

    def remove(self, storage: Candidate) -> None:
        del self.candidates[storage]

    def evicted(self, storage: Candidate) -> None:
        self.gone.add(storage)

    def returned(self, storage: Candidate) -> None:
        self.gone.remove(storage)

    def forgotten(self, storage: Candidate) -> None:
        self.gone.remove(storage)

    def choose(self, now: int) -> Candidate | None:
        return min(self.candidates, key=self._score, default=None)

    def _score(self, storage: Candidate) -> tuple[int, int, int]:
        above = sum(parent.cost for parent in set(storage.parents()) & self.gone)
        below = sum(not child.resident for child in storage.children())
        return (storage.cost + above) // max(1, storage.nbytes), below, storage.order


@final
@dataclass(frozen=True)
class Cheapest(Policy):
    """A policy that evicts the storage that is cheapest to recompute."""

    def bind(self) -> Chooser:
        return CheapestChooser()


class With(Policy):
    """A policy whose chooser is created by the function `make`."""

    def __init__(self, make: Callable[[], Chooser]) -> None:
        self._make = make

    def bind(self) -> Chooser:
        return self._make()
