"""What letting go of a storage would cost: its own cost, and that of its evicted neighborhood.

DTR (Kirisame et al., ICLR 2021), section 4.1 and appendix C. The *evicted neighborhood* e*(s) holds
the evicted storages that s needs to be recomputed, through evicted storages only (ancestors), and
those that need s (descendants). Ancestors and descendants are summed apart, as the authors do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import final

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate

Direction = Callable[[Candidate], Iterable[Candidate]]


def _parents(storage: Candidate) -> Iterable[Candidate]:
    return storage.parents()


def _children(storage: Candidate) -> Iterable[Candidate]:
    return storage.children()


def _region(start: Candidate, direction: Direction) -> Iterator[Candidate]:
    """Everything reachable from `start` through evicted storages: those, and their border."""
    seen = {start}
    stack = [start]
    while stack:
        for neighbor in direction(stack.pop()):
            if neighbor not in seen:
                seen.add(neighbor)
                yield neighbor
                if not neighbor.resident:
                    stack.append(neighbor)


def evicted_neighborhood(storage: Candidate) -> set[Candidate]:
    """e*(s): the evicted storages that `storage` needs, or that need it, through evicted ones."""
    return {
        neighbor
        for direction in (_parents, _children)
        for neighbor in _region(storage, direction)
        if not neighbor.resident
    }


class Neighborhood(ABC):
    """The cost in a score, and which storages' costs change when one is evicted or returns."""

    @abstractmethod
    def cost(self, storage: Candidate) -> Nanoseconds:
        """The cost (ns) of letting go the resident `storage` now."""

    def evicted(self, storage: Candidate) -> Iterable[Candidate]:
        """Takes note; returns the storages whose cost may have changed."""
        return ()

    def returned(self, storage: Candidate) -> Iterable[Candidate]:
        """Takes note; returns the storages whose cost may have changed."""
        return ()

    def forgotten(self, storage: Candidate) -> Iterable[Candidate]:
        """Takes note that an evicted storage will never be asked for again."""
        return self.returned(storage)

    def repriced(self, storage: Candidate) -> Iterable[Candidate]:
        """Takes note that the storage's own cost changed."""
        return (storage,)


@final
class Nothing(Neighborhood):
    """Every storage costs the same."""

    def cost(self, storage: Candidate) -> Nanoseconds:
        return 1


@final
class Local(Neighborhood):
    """The storage's own cost c0."""

    def cost(self, storage: Candidate) -> Nanoseconds:
        return storage.cost


@final
class Exact(Neighborhood):
    """c0 plus the cost of e*(s), in full; with `descendants=False` only of its ancestors."""

    def __init__(self, *, descendants: bool = True) -> None:
        self._directions = (_parents, _children) if descendants else (_parents,)

    def cost(self, storage: Candidate) -> Nanoseconds:
        total = storage.cost
        for direction in self._directions:
            for neighbor in _region(storage, direction):
                if not neighbor.resident:
                    total += neighbor.cost
        return total

    def evicted(self, storage: Candidate) -> Iterable[Candidate]:
        # Who reaches `storage` going down is found going up from it, and the other way round.
        directions = (_parents, _children) if len(self._directions) == 2 else (_children,)
        for direction in directions:
            for neighbor in _region(storage, direction):
                if neighbor.resident:
                    yield neighbor

    def returned(self, storage: Candidate) -> Iterable[Candidate]:
        return self.evicted(storage)

    def repriced(self, storage: Candidate) -> Iterable[Candidate]:
        yield storage
        if not storage.resident:
            yield from self.evicted(storage)


class _Class:
    """A node of the union-find forest; a representative carries the figures of its class."""

    __slots__ = ("border", "sum", "up")

    def __init__(self, cost: Nanoseconds) -> None:
        self.up: _Class | None = None
        self.sum = cost
        self.border: dict[Candidate, None] = {}  # residents next to the class


@final
class Classes(Neighborhood):
    """c0 plus the evicted neighborhood approximated by union-find (h_DTR^eq, appendix C.2).

    Evicted storages that touch form a class, with the sum of their costs. One that returns takes
    its cost out of the class, but the class is not split (the paper's approximation).
    """

    def __init__(self) -> None:
        self._node: dict[Candidate, _Class] = {}  # of each evicted storage
        self._paid: dict[Candidate, Nanoseconds] = {}  # what it put into its class

    def cost(self, storage: Candidate) -> Nanoseconds:
        total = storage.cost
        for representative in self._adjacent(storage):
            representative.border[storage] = None
            total += representative.sum
        return total

    def evicted(self, storage: Candidate) -> Iterable[Candidate]:
        merged = _Class(storage.cost)
        for other in self._adjacent(storage):
            other.up = merged
            merged.sum += other.sum
            merged.border.update(other.border)
            other.border.clear()
        self._node[storage] = merged
        self._paid[storage] = storage.cost
        for neighbor in (*storage.parents(), *storage.children()):
            if neighbor.resident:
                merged.border[neighbor] = None
        return tuple(merged.border)

    def returned(self, storage: Candidate) -> Iterable[Candidate]:
        if storage not in self._node:
            return ()
        representative = self._find(self._node.pop(storage))
        representative.sum -= self._paid.pop(storage)
        return tuple(representative.border)

    def _adjacent(self, storage: Candidate) -> list[_Class]:
        """The distinct classes next to `storage`."""
        found: dict[_Class, None] = {}
        for neighbor in (*storage.parents(), *storage.children()):
            if neighbor in self._node:
                found[self._find(self._node[neighbor])] = None
        return list(found)

    def _find(self, node: _Class) -> _Class:
        representative = node
        while representative.up is not None:
            representative = representative.up
        while node is not representative:
            following = node.up
            assert following is not None
            node.up, node = representative, following
        return representative
