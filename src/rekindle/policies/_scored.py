"""Choose the candidate with the lowest score cost / (bytes * staleness), or an ablation of it.

This file computes with the inverse of the score, the **benefit** of an eviction: bytes * staleness
/ cost. The candidate with the greatest benefit is evicted.

Costs are computed lazily, as in the lazy greedy algorithm (Minoux 1978). For each candidate the
chooser stores a lower bound of its cost, which gives an upper bound of its benefit. The chooser
takes the candidate with the greatest bound and computes its true cost. If the benefit of that
candidate is still the greatest, the candidate is evicted. Otherwise the search continues. Evictions
only raise the costs of other storages, so the bounds stay valid without work. When evicted storages
return to memory, the neighborhood reports which costs may have fallen, and how far.
"""

from __future__ import annotations

import math
from typing import TypeVar

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate, Chooser
from rekindle.policies._benefits import Benefits
from rekindle.policies._neighborhood import Neighborhood

_Number = TypeVar("_Number", int, float)

#: Replaces a cost of 0. The benefit is nearly infinite with this cost, but candidates still compare
#: by size.
_LEAST = 1e-9


class ScoredChooser(Chooser):
    """A chooser for one form of the score. Of equal scores, the latest candidate is chosen."""

    def __init__(
        self, neighborhood: Neighborhood, *, by_size: bool, by_staleness: bool, root: bool = False
    ) -> None:
        """Make a chooser without candidates.

        Args:
            neighborhood: Computes the cost in the score.
            by_size: Divide by the size of the storage.
            by_staleness: Divide by the time since the last access.
            root: Use the square root of the staleness, by the square of the benefit.
        """
        self._neighborhood = neighborhood
        self.remembers = neighborhood.remembers
        self._by_size = by_size
        self._by_staleness = by_staleness
        self._root = root
        self._benefits = Benefits(moving=by_staleness)
        # slot of each candidate in `_benefits`
        self._slot: dict[Candidate, int] = {}
        self._member: dict[int, Candidate] = {}  # candidate of each slot
        self._price: dict[Candidate, float] = {}  # cost of each candidate: exact, or a lower bound
        # Value of `_changes` when the cost was computed; a missing entry means a lower bound.
        self._priced: dict[Candidate, int] = {}
        self._changes = 0  # number of events that may change costs
        # Updates of candidates since the last `choose`: True for new or touched candidates, False
        # for storages that are no candidates any more. Most storages that an operator locks are
        # candidates again before the next `choose`, so deferring updates preserves their cost.
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

    def evicted(self, storage: Candidate) -> None:
        self._neighborhood.evicted(storage)
        # Remove its benefit, because its cost will differ when it returns to memory.
        if storage in self._slot:
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
        if storage in self._slot:  # Store a lower bound, because the cost may have fallen.
            self._reprice(storage, self._least(storage))
        self._changes += 1

    def choose(self, now: Nanoseconds) -> Candidate | None:
        self._listen()
        self._lower()
        if not self._slot:
            return None
        while True:
            slot = self._benefits.best(now)
            storage = self._member[slot]
            # If this benefit is exact, no other one is greater, because it is at least as great as
            # the upper bounds of all others.
            if self._priced.get(storage) == self._changes:
                return storage
            self._priced[storage] = self._changes
            price = self._neighborhood.cost(storage) or _LEAST
            # If the stored lower bound equals the true cost, the benefit is exact as well.
            if price == self._price[storage]:
                return storage
            self._reprice(storage, price)

    def recompute_ns(self, storage: Candidate) -> Nanoseconds:
        return self._neighborhood.again(storage)

    def loss(self, storage: Candidate, now: Nanoseconds) -> float:
        cost = float(self._neighborhood.cost(storage))
        if not self._by_staleness:
            return cost
        staleness = max(1, now - storage.last_access)
        return cost / math.sqrt(staleness) if self._root else cost / staleness

    def _listen(self) -> None:
        """Update the benefits by all changes of candidates since the last `choose`."""
        for storage, candidate in self._news.items():
            if not candidate:
                self._take_out(storage)
                continue
            if storage not in self._slot:
                price = self._price[storage] = self._least(storage)
                slot = self._slot[storage] = self._benefits.add(self._power(price))
                self._member[slot] = storage
            last, order = storage.last_access, storage.order
            self._benefits.renew(self._slot[storage], self._weight(storage), last, order)
        self._news.clear()

    def _take_out(self, storage: Candidate) -> None:
        """Remove the benefit of `storage`."""
        slot = self._slot.pop(storage)
        del self._member[slot], self._price[storage]
        self._benefits.remove(slot)
        self._priced.pop(storage, None)

    def _weight(self, storage: Candidate) -> int:
        """Return the factor by which the size of `storage` enters its benefit."""
        return self._power(storage.nbytes) if self._by_size else 1

    def _power(self, number: _Number) -> _Number:
        """Return the square of `number` if the score uses the root of the staleness.

        The square is written as a product, because `**` may round differently from the product in
        the native core.
        """
        return number * number if self._root else number

    def _least(self, storage: Candidate) -> float:
        """Return a positive lower bound of the cost of `storage`."""
        return self._neighborhood.least(storage) or _LEAST

    def _reprice(self, storage: Candidate, price: float) -> None:
        """Store the cost `price` of `storage`, and update its benefit."""
        self._price[storage] = price
        self._benefits.reprice(self._slot[storage], self._power(price))

    def _lower(self) -> None:
        """Lower the stored costs that may have fallen, so that all are lower bounds again."""
        for storage, fall in self._neighborhood.cost_decreases():
            if storage in self._slot and fall:
                self._reprice(storage, max(self._least(storage), self._price[storage] - fall))
                self._priced.pop(storage, None)
