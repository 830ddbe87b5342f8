"""Least score first, for scores of the form cost / (bytes * staleness) and its ablations.

Written upside down: the benefit of letting go, bytes * staleness / cost, and the greatest goes.

The costs are known lazily, as in the lazy greedy algorithm (Minoux 1978): of each candidate we keep
a cost that is no more than the true one, so its benefit no less. The candidate with the greatest
such benefit is priced anew; if it stays the greatest, it is the one. Evictions only raise the costs
of others, so they cost nothing; the neighborhood says whose costs may have fallen, and how far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, final

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate, Chooser
from rekindle.policies._envelope import Envelope
from rekindle.policies._neighborhood import Neighborhood, Watched

_Number = TypeVar("_Number", int, float)

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
        self._by_staleness = by_staleness
        self._root = root
        self._lines = Envelope(moving=by_staleness)
        self._slot: dict[Candidate, int] = {}
        self._member: dict[int, Candidate] = {}
        self._price: dict[Candidate, float] = {}
        self._priced: dict[Candidate, int] = {}  # when, in changes; missing: only a lower bound
        self._changes = 0
        # What became a candidate or was touched since the last choice (True), or is none any more.
        # Most of what is locked for an operator is back before anybody chooses: it keeps its price.
        self._news: dict[Candidate, bool] = {}

    def add(self, storage: Candidate) -> None:
        self._news[storage] = True

    def touched(self, storage: Candidate) -> None:
        self._news[storage] = True

    def remove(self, storage: Candidate) -> None:
        if storage in self._slot:
            self._news[storage] = False
        else:
            del self._news[storage]

    def watch(self, priced: Callable[[Candidate], None]) -> None:
        self._neighborhood = Watched(self._neighborhood, priced)

    def expected(self, storage: Candidate) -> None:
        self._neighborhood.expected(storage)
        self._changes += 1

    def evicted(self, storage: Candidate) -> None:
        self._neighborhood.evicted(storage)
        if storage in self._slot:  # it will be another matter when it is back
            self._take_out(storage)
            self._news.pop(storage, None)
        self._changes += 1

    def returned(self, storage: Candidate) -> None:
        self._neighborhood.returned(storage)
        self._changes += 1

    def forgotten(self, storage: Candidate) -> None:
        self._neighborhood.forgotten(storage)
        self._changes += 1

    def repriced(self, storage: Candidate) -> None:
        self._neighborhood.repriced(storage)
        if storage in self._slot:  # its cost may have fallen as well
            self._reprice(storage, self._least(storage))
        self._changes += 1

    def choose(self, now: Nanoseconds) -> Candidate | None:
        self._listen()
        self._lower()
        if not self._slot:
            return None
        if self._neighborhood.overdrawn():
            return self._least_of_all(now)
        while True:
            slot = self._lines.best(now)
            storage = self._member[slot]
            if self._priced.get(storage) == self._changes:
                return storage
            self._priced[storage] = self._changes
            price = self._neighborhood.cost(storage) or _LEAST
            if price == self._price[storage]:
                return storage
            self._reprice(storage, price)

    def _least_of_all(self, now: Nanoseconds) -> Candidate:
        """Quirk: as the authors look for it, one by one, where scores may be less than nothing."""
        ordered = sorted(self._slot, key=lambda storage: storage.order)
        least, found = math.inf, ordered[-1]
        for storage in ordered:
            weight = self._weight(storage)
            if self._by_staleness:
                weight *= now - storage.last_access
            score = self._neighborhood.cost(storage) / weight if weight else math.inf
            if score <= least:
                least, found = score, storage
            if score == 0:
                break
        return found

    def recompute_ns(self, storage: Candidate) -> Nanoseconds:
        return self._neighborhood.again(storage)

    def loss(self, storage: Candidate, now: Nanoseconds) -> float:
        cost = float(self._neighborhood.cost(storage))
        if not self._by_staleness:
            return cost
        staleness = max(1, now - storage.last_access)
        return cost / math.sqrt(staleness) if self._root else cost / staleness

    def _listen(self) -> None:
        """Brings the lines up to date."""
        for storage, candidate in self._news.items():
            if not candidate:
                self._take_out(storage)
                continue
            if storage not in self._slot:
                price = self._price[storage] = self._least(storage)
                slot = self._slot[storage] = self._lines.add(self._power(price))
                self._member[slot] = storage
            last, order = storage.last_access, storage.order
            self._lines.renew(self._slot[storage], self._weight(storage), last, order)
        self._news.clear()

    def _take_out(self, storage: Candidate) -> None:
        slot = self._slot.pop(storage)
        del self._member[slot], self._price[storage]
        self._lines.remove(slot)
        self._priced.pop(storage, None)

    def _weight(self, storage: Candidate) -> int:
        return self._power(storage.nbytes) if self._by_size else 1

    def _power(self, number: _Number) -> _Number:
        """Written as a product: `**` may round another way than the native engine's product."""
        return number * number if self._root else number

    def _least(self, storage: Candidate) -> float:
        return self._neighborhood.least(storage) or _LEAST

    def _reprice(self, storage: Candidate, price: float) -> None:
        self._price[storage] = price
        self._lines.reprice(self._slot[storage], self._power(price))

    def _lower(self) -> None:
        """Makes every cost a lower bound again."""
        for storage, fall in self._neighborhood.fallen():
            if storage in self._slot and fall:
                self._reprice(storage, max(self._least(storage), self._price[storage] - fall))
                self._priced.pop(storage, None)
