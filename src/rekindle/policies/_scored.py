"""Least score first, for scores of the form cost / (bytes * staleness) and its ablations.

Written upside down: the benefit of letting go, bytes * staleness / cost, and the greatest goes.

The costs are known lazily, as in the lazy greedy algorithm (Minoux 1978): of each candidate we keep
a cost that is no more than the true one, so its benefit no less. The candidate with the greatest
such benefit is priced anew; if it stays the greatest, it is the one. Evictions only raise the costs
of others, so they cost nothing; the neighborhood says whose costs may have fallen, and how far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate, Chooser
from rekindle.policies._envelope import Envelope
from rekindle.policies._neighborhood import Neighborhood, Watched

# A cost of nothing makes the benefit as good as infinite, but keeps the order by size.
_LEAST = 1e-9


@final
class ScoredChooser(Chooser):
    """Follows candidates; ties go to the storage that last became a candidate."""

    def __init__(
        self, neighborhood: Neighborhood, *, by_size: bool, by_staleness: bool, root: bool = False
    ) -> None:
        """With `root` it is the square root of the staleness that counts: then the square of the
        benefit is a line in time."""
        self._neighborhood = neighborhood
        self.remembers = neighborhood.remembers
        self._by_size = by_size
        self._power = 2 if root else 1
        self._lines = Envelope(moving=by_staleness)
        self._slot: dict[Candidate, int] = {}
        self._member: dict[int, Candidate] = {}
        self._price: dict[Candidate, float] = {}
        self._priced: dict[Candidate, int] = {}  # when, in changes; missing: only a lower bound
        self._changes = 0

    def add(self, storage: Candidate) -> None:
        size = storage.nbytes if self._by_size else 1
        price = self._neighborhood.least(storage) or _LEAST
        power = self._power
        slot = self._lines.add(size**power, price**power, storage.last_access, storage.order)
        self._price[storage] = price
        self._slot[storage] = slot
        self._member[slot] = storage

    def remove(self, storage: Candidate) -> None:
        slot = self._slot.pop(storage)
        del self._member[slot], self._price[storage]
        self._lines.remove(slot)
        self._priced.pop(storage, None)

    def watch(self, priced: Callable[[Candidate], None]) -> None:
        self._neighborhood = Watched(self._neighborhood, priced)

    def touched(self, storage: Candidate) -> None:
        self._lines.access(self._slot[storage], storage.last_access)

    def expected(self, storage: Candidate) -> None:
        self._neighborhood.expected(storage)
        self._changes += 1

    def evicted(self, storage: Candidate) -> None:
        self._neighborhood.evicted(storage)
        self._changes += 1

    def returned(self, storage: Candidate) -> None:
        self._neighborhood.returned(storage)
        self._changes += 1

    def forgotten(self, storage: Candidate) -> None:
        self._neighborhood.forgotten(storage)
        self._changes += 1

    def repriced(self, storage: Candidate) -> None:
        self._neighborhood.repriced(storage)
        self._changes += 1

    def choose(self, now: Nanoseconds) -> Candidate | None:
        self._lower()
        if not self._slot:
            return None
        while True:
            slot = self._lines.best(now)
            storage = self._member[slot]
            if self._priced.get(storage) == self._changes:
                return storage
            self._priced[storage] = self._changes
            price = self._neighborhood.cost(storage) or _LEAST
            if price != self._price[storage]:
                self._reprice(storage, price)

    def recompute_ns(self, storage: Candidate) -> Nanoseconds:
        return self._neighborhood.again(storage)

    def _reprice(self, storage: Candidate, price: float) -> None:
        self._price[storage] = price
        self._lines.reprice(self._slot[storage], price**self._power)

    def _lower(self) -> None:
        """Makes every cost a lower bound again."""
        for storage, fall in self._neighborhood.fallen():
            if storage in self._slot and fall:
                least = self._neighborhood.least(storage) or _LEAST
                self._reprice(storage, max(least, self._price[storage] - fall))
                self._priced.pop(storage, None)
