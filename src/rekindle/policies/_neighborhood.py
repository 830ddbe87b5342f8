"""What letting go of a storage would cost: its own cost, and that of its evicted neighborhood.

DTR (Kirisame et al., ICLR 2021), section 4.1 and appendix C. The *evicted neighborhood* e*(s) holds
the evicted storages that s needs to be recomputed, through evicted storages only (ancestors), and
those that need s (descendants). Ancestors and descendants are summed apart, as the authors do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Literal, final

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate


def evicted_neighborhood(storage: Candidate) -> set[Candidate]:
    """e*(s): the evicted storages that `storage` needs, or that need it, through evicted ones."""
    found: set[Candidate] = set()
    for upwards in (True, False):
        seen = {storage}
        stack = [storage]
        while stack:
            last = stack.pop()
            for other in last.parents() if upwards else last.children():
                if other not in seen and not other.resident:
                    seen.add(other)
                    stack.append(other)
        found |= seen
    return found - {storage}


class Neighborhood(ABC):
    """The cost in a score, and whose costs may have fallen since it was last asked."""

    #: Whether a cost depends on what came and went, not only on what is evicted now.
    remembers = False

    @abstractmethod
    def cost(self, storage: Candidate) -> Nanoseconds:
        """The cost (ns) of letting go the resident `storage` now."""

    def least(self, storage: Candidate) -> Nanoseconds:
        """A quick lower bound of `cost(storage)`."""
        return storage.cost

    def overdrawn(self) -> bool:
        """Quirk: whether a cost may be less than `least`, and less than nothing."""
        return False

    def again(self, storage: Candidate) -> Nanoseconds:
        """The time (ns) that it would take to have `storage` again, as far as is known."""
        return storage.cost

    def fallen(self) -> Iterable[tuple[Candidate, float]]:
        """Whose costs may have fallen since this was last asked, and how far at most."""
        return ()

    def expected(self, storage: Candidate) -> None:  # noqa: B027
        """Quirk: a call in progress will make `storage`, which counts as evicted until then."""

    def evicted(self, storage: Candidate) -> None:  # noqa: B027
        """`storage` left memory and can be recomputed."""

    def returned(self, storage: Candidate) -> None:  # noqa: B027
        """`storage` is in memory again."""

    def forgotten(self, storage: Candidate) -> None:  # noqa: B027
        """The evicted `storage` will never be asked for again."""

    def repriced(self, storage: Candidate) -> None:  # noqa: B027
        """The storage's own cost rose, and it may have more parents."""


@final
class Watched(Neighborhood):
    """Another neighborhood, and somebody who hears of each cost that it is asked for."""

    def __init__(self, watched: Neighborhood, asked: Callable[[Candidate], None]) -> None:
        self._watched = watched
        self._asked = asked
        self.least = watched.least
        self.overdrawn = watched.overdrawn
        self.again = watched.again
        self.fallen = watched.fallen
        self.expected = watched.expected
        self.evicted = watched.evicted
        self.returned = watched.returned
        self.forgotten = watched.forgotten
        self.repriced = watched.repriced

    def cost(self, storage: Candidate) -> Nanoseconds:
        self._asked(storage)
        return self._watched.cost(storage)


@final
class Nothing(Neighborhood):
    """Every storage costs the same."""

    def cost(self, storage: Candidate) -> Nanoseconds:
        return 1

    def least(self, storage: Candidate) -> Nanoseconds:
        return 1


@final
class Local(Neighborhood):
    """The storage's own cost c0."""

    def cost(self, storage: Candidate) -> Nanoseconds:
        return storage.cost


_Graph = dict[Candidate, dict[Candidate, None]]


@final
class Exact(Neighborhood):
    """c0 plus the cost of e*(s), in full.

    `descendants`: all of them, none, or capped (they count for two thirds of c0 at most).

    Keeps the graph of what is evicted. When storages return, everything that reached them through
    that graph may have become cheaper, by no more than the cost of what lies on their other side.
    """

    def __init__(self, *, descendants: Literal["all", "none", "capped"] = "all") -> None:
        self._descendants = descendants
        self._up: _Graph = {}  # the evicted parents of each evicted storage
        self._down: _Graph = {}  # and its evicted children
        # What returned since `fallen`, and its parents then: it may have left the graph meanwhile.
        self._back: dict[Candidate, tuple[Candidate, ...]] = {}
        self._lost: dict[Candidate, float] = {}  # what it and all above it lost at most since then
        self._expected: dict[Candidate, None] = {}
        self._noticed: dict[Candidate, None] = {}  # who knows that they are expected
        self._asked = 0  # how often a cost was
        self._since: dict[Candidate, int] = {}  # what that was when it was evicted

    def cost(self, storage: Candidate) -> Nanoseconds:
        self._asked += 1
        total = storage.cost + _sum(_reach(self._up, storage.parents()))
        if self._descendants == "all":
            below = _reach(self._down, storage.children())
            if self._expected and storage not in self._noticed:
                below = [other for other in below if other not in self._expected]
            total += _sum(below)
        elif self._descendants == "capped":
            total += _sum_within(self._down, storage.children(), 2 * storage.cost // 3)
        return total

    def again(self, storage: Candidate) -> Nanoseconds:
        return storage.cost + _sum(_reach(self._up, storage.parents()))

    def expected(self, storage: Candidate) -> None:
        """The authors look at a neighborhood again when something in it returns, and only then see
        the outputs of the call in progress in it."""
        self._expected[storage] = None
        self.evicted(storage)

    def _notice(self, storage: Candidate) -> None:
        """All that reach `storage` going down look at what is below them."""
        self._noticed[storage] = None
        for member in (storage, *_reach(self._up, storage.parents())):
            self._noticed.update((parent, None) for parent in member.parents())

    def evicted(self, storage: Candidate) -> None:
        if storage in self._noticed:
            self._notice(storage)
        seen = self._back.pop(storage, None) is not None
        self._since.setdefault(storage, -1 if seen else self._asked)
        self._up[storage] = {p: None for p in storage.parents() if p in self._up}
        self._down[storage] = {c: None for c in storage.children() if c in self._down}
        for parent in self._up[storage]:
            self._down[parent][storage] = None
        for child in self._down[storage]:
            self._up[child][storage] = None

    def returned(self, storage: Candidate) -> None:
        if storage in self._expected:
            del self._expected[storage]
            if not self._expected:
                self._noticed.clear()
        elif self._expected:
            self._notice(storage)
        if self._remove(storage) < self._asked:  # else nobody saw it evicted
            self._back[storage] = tuple(storage.parents())

    def forgotten(self, storage: Candidate) -> None:
        lost = storage.cost + self._lost.pop(storage, 0.0)
        if self._down[storage]:  # taken out of the middle: no matter how much was behind it
            lost = math.inf
            for child in self._down[storage]:
                self._back[child] = tuple(child.parents())
        self._remove(storage)
        for parent in storage.parents():
            self._lost[parent] = self._lost.get(parent, 0.0) + lost

    def repriced(self, storage: Candidate) -> None:
        if storage in self._up:
            self.evicted(storage)

    def _remove(self, storage: Candidate) -> int:
        for parent in self._up.pop(storage):
            del self._down[parent][storage]
        for child in self._down.pop(storage):
            del self._up[child][storage]
        return self._since.pop(storage)

    def fallen(self) -> Iterable[tuple[Candidate, float]]:
        back, lost = self._back, self._lost
        if not back and not lost:
            return
        self._back, self._lost = {}, {}
        nearest = [parent for parents in back.values() for parent in parents]
        above = _reach(self._up, (*nearest, *lost))
        below = _reach(self._down, (c for s in back for c in s.children()))
        fall = _sum(back) + sum(lost.values())
        loss_above, loss_below = fall + _sum(below), fall + _sum(above)
        if self._descendants != "none":
            border = (s for member in above for s in member.parents())
            for storage in dict.fromkeys((*nearest, *border, *lost)):
                yield storage, loss_above
        border = (s for group in (back, below) for member in group for s in member.children())
        for storage in dict.fromkeys(border):
            yield storage, loss_below


def _reach(graph: _Graph, start: Iterable[Candidate]) -> dict[Candidate, None]:
    """Everything in `graph` that can be reached from `start`, itself included."""
    stack = [storage for storage in start if storage in graph]
    seen = dict.fromkeys(stack)
    while stack:
        for other in graph[stack.pop()]:
            if other not in seen:
                seen[other] = None
                stack.append(other)
    return seen


def _sum(storages: Iterable[Candidate]) -> Nanoseconds:
    return sum([storage.cost for storage in storages])


def _sum_within(graph: _Graph, start: Iterable[Candidate], most: Nanoseconds) -> Nanoseconds:
    """The cost of what `_reach` finds, or `most` if that is less; no further than that."""
    stack = [storage for storage in start if storage in graph]
    seen = dict.fromkeys(stack)
    total = 0
    while stack and total < most:
        storage = stack.pop()
        total += storage.cost
        for other in graph[storage]:
            if other not in seen:
                seen[other] = None
                stack.append(other)
    return min(total, most)


class _Class:
    """A node of the union-find forest; a representative carries the figures of its class."""

    __slots__ = ("border", "fall", "members", "sum", "up")

    def __init__(self) -> None:
        self.up: _Class | None = None
        self.sum: Nanoseconds = 0
        self.members = 0  # evicted storages
        self.fall: Nanoseconds = 0  # of the sum, since `fallen`
        self.border: dict[Candidate, None] = {}  # residents next to the class, and former ones


@final
class Classes(Neighborhood):
    """c0 plus the evicted neighborhood approximated by union-find (h_DTR^eq, appendix C.2).

    Evicted storages that touch form a class, with the sum of their costs. One that returns takes
    its cost out of the class, but the class is not split (the paper's approximation).

    Quirk: the outputs of a call in progress are in classes, to which they gave nothing, and take
    their cost out once they are there; so does a storage of which a view was made while it was
    evicted, with the cost of the view. The sum of a class may fall below nothing so.
    """

    remembers = True

    def __init__(self) -> None:
        self._node: dict[Candidate, _Class] = {}  # of each evicted storage
        self._owed: dict[Candidate, Nanoseconds] = {}  # what it will take out of its class
        self._fallen: dict[_Class, None] = {}
        self._detached: dict[Candidate, None] = {}  # they may be next to that class no longer
        self._below: dict[_Class, None] = {}  # representatives of less than nothing

    def overdrawn(self) -> bool:
        return bool(self._below)

    def cost(self, storage: Candidate) -> Nanoseconds:
        total = storage.cost
        for representative in self._adjacent(storage):
            representative.border[storage] = None
            total += representative.sum
        return total

    def again(self, storage: Candidate) -> Nanoseconds:
        return self.cost(storage)

    def expected(self, storage: Candidate) -> None:
        node = self._node[storage] = _Class()
        node.members = 1
        self._owed[storage] = storage.cost

    def repriced(self, storage: Candidate) -> None:
        if storage in self._node:  # a view is made of it
            self._owed[storage] = storage.cost

    def evicted(self, storage: Candidate) -> None:
        adjacent = self._adjacent(storage)
        merged = max(adjacent, key=lambda other: len(other.border), default=None) or _Class()
        for other in adjacent:
            if other is not merged:
                other.up = merged
                merged.sum += other.sum
                merged.fall += other.fall
                merged.members += other.members
                self._below.pop(other, None)
                merged.border.update(other.border)
                other.border.clear()
        merged.sum += storage.cost
        self._node[storage] = merged
        merged.members += 1
        self._owed[storage] = storage.cost
        self._settle(merged)
        for neighbor in (*storage.parents(), *storage.children()):
            if neighbor.resident:
                merged.border[neighbor] = None

    def returned(self, storage: Candidate) -> None:
        if storage in self._node:
            representative = self._find(self._node.pop(storage))
            owed = self._owed.pop(storage)
            representative.sum -= owed
            representative.fall += owed
            representative.members -= 1
            self._settle(representative)
            self._fallen[representative] = None
            self._detached.update(dict.fromkeys((*storage.parents(), *storage.children())))

    def forgotten(self, storage: Candidate) -> None:
        self.returned(storage)

    def fallen(self) -> Iterable[tuple[Candidate, float]]:
        for representative in {self._find(node): None for node in self._fallen}:
            for storage in representative.border:
                yield storage, representative.fall
            representative.fall = 0
        self._fallen.clear()
        for storage in self._detached:
            yield storage, math.inf
        self._detached.clear()

    def _settle(self, representative: _Class) -> None:
        if representative.sum < 0 and representative.members:
            self._below[representative] = None
        else:
            self._below.pop(representative, None)

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
