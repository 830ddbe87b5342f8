"""Least score first, for scores of the form cost / (bytes * staleness) and its ablations.

Written upside down: the benefit of letting go, bytes * staleness / cost, and the greatest goes.
Only the staleness moves with the clock, and it moves for all alike: an array of the constant
factors and one of the last accesses give every benefit in two vector operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import numpy as np

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate, Chooser
from rekindle.policies._neighborhood import Neighborhood


@final
class ScoredChooser(Chooser):
    """Follows candidates in arrays; ties go to the storage that last became a candidate.

    A candidate's last access seldom changes while it is a candidate, and then the engine says so:
    whatever reads a storage locks or holds it first.
    """

    def __init__(self, neighborhood: Neighborhood, *, by_size: bool, by_staleness: bool) -> None:
        self._neighborhood = neighborhood
        self._by_size = by_size
        self._by_staleness = by_staleness
        self._slot: dict[Candidate, int] = {}
        self._members: list[Candidate | None] = []
        self._vacant: list[int] = []
        self._factor = np.full(64, -1.0)  # bytes / cost; negative: no candidate here
        self._last = np.zeros(64)
        self._stale: dict[Candidate, None] = {}  # candidates whose factor must be computed again

    def add(self, storage: Candidate) -> None:
        if self._vacant:
            slot = self._vacant.pop()
            self._members[slot] = storage
        else:
            slot = len(self._members)
            self._members.append(storage)
            if slot == len(self._factor):
                self._factor = np.concatenate((self._factor, np.full(slot, -1.0)))
                self._last = np.concatenate((self._last, np.zeros(slot)))
        self._slot[storage] = slot
        self._last[slot] = storage.last_access
        self._stale[storage] = None

    def remove(self, storage: Candidate) -> None:
        slot = self._slot.pop(storage)
        self._members[slot] = None
        self._factor[slot] = -1.0
        self._last[slot] = -1.0
        self._vacant.append(slot)
        self._stale.pop(storage, None)

    def touched(self, storage: Candidate) -> None:
        self._last[self._slot[storage]] = storage.last_access

    def evicted(self, storage: Candidate) -> None:
        self._note(self._neighborhood.evicted(storage))

    def returned(self, storage: Candidate) -> None:
        self._note(self._neighborhood.returned(storage))

    def forgotten(self, storage: Candidate) -> None:
        self._note(self._neighborhood.forgotten(storage))

    def repriced(self, storage: Candidate) -> None:
        self._note(self._neighborhood.repriced(storage))

    def choose(self, now: Nanoseconds) -> Candidate | None:
        if not self._slot:
            return None
        self._refresh()
        used = len(self._members)
        benefit = self._factor[:used]
        if self._by_staleness:
            benefit = benefit * (now - self._last[:used])
        best = int(benefit.argmax())
        ties = np.flatnonzero(benefit == benefit[best])
        tied = [member for slot in ties if (member := self._members[slot]) is not None]
        return max(tied, key=lambda storage: storage.order)

    def _note(self, changed: Iterable[Candidate]) -> None:
        for storage in changed:
            if storage in self._slot:
                self._stale[storage] = None

    def _refresh(self) -> None:
        for storage in self._stale:
            cost = self._neighborhood.cost(storage)
            size = storage.nbytes if self._by_size else 1
            # A cost of nothing makes the benefit as good as infinite, but keeps the order by size.
            self._factor[self._slot[storage]] = size / max(cost, 1e-9)
        self._stale.clear()
