"""The cost of evicting a storage: its own cost and that of its evicted neighborhood.

Source: DTR (Kirisame et al., ICLR 2021), section 4.1 and appendix C.

An evicted storage must be recomputed if it is needed again, and its inputs may be evicted as well.
The **evicted neighborhood** e*(s) of a storage s has two parts. Its ancestors are the evicted
storages that must be recomputed before s, found through evicted storages only. Its descendants are
the evicted storages that need s for their own recomputation. The costs of the two parts are summed
separately, as the authors do, so a storage in both counts twice.

The classes of this file compute the cost of e*(s) exactly (`Exact`), approximately (`Classes`), or
not at all (`Local`, `Nothing`). `ScoredChooser` uses them to compute scores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final, Literal, final

from rekindle._types import Nanoseconds
from rekindle.policies._base import Candidate


class Neighborhood(ABC):
    """The cost in a policy's score: the numerator of cost / (bytes * staleness).

    A neighborhood also reports which costs may have fallen, so that a chooser can keep lower bounds
    of all costs (see `_scored`).
    """

    #: True if a cost depends on past events, not only on which storages are evicted now.
    remembers = False

    @abstractmethod
    def cost(self, storage: Candidate) -> Nanoseconds:
        """Return the cost (ns) of evicting the resident `storage` now."""

    def least(self, storage: Candidate) -> Nanoseconds:
        """Return a lower bound of `cost(storage)` that is quick to compute."""
        return storage.cost

    def again(self, storage: Candidate) -> Nanoseconds:
        """Return an estimate of the time (ns) to recompute `storage`."""
        return storage.cost

    def cost_decreases(self) -> Iterable[tuple[Candidate, float]]:
        """Report the costs that may have fallen since the last call.

        Returns:
            Pairs of a storage and the most that its cost may have fallen.
        """
        return ()

    def evicted(self, storage: Candidate) -> None:  # noqa: B027
        """Record that `storage` was evicted. It can be recomputed or swapped in."""

    def returned(self, storage: Candidate) -> None:  # noqa: B027
        """Record that `storage` is in memory again."""

    def forgotten(self, storage: Candidate) -> None:  # noqa: B027
        """Record that the evicted `storage` left the graph, because nothing needs it any more."""

    def repriced(self, storage: Candidate) -> None:  # noqa: B027
        """Record that operators of `storage` cost more now. It may have more parents now."""


@final
class Nothing(Neighborhood):
    """Cost 1 for every storage: the cost plays no role in the score."""

    def cost(self, storage: Candidate) -> Nanoseconds:
        return 1

    def least(self, storage: Candidate) -> Nanoseconds:
        return 1


@final
class Local(Neighborhood):
    """Only the storage's own cost c0, without its evicted neighborhood."""

    def cost(self, storage: Candidate) -> Nanoseconds:
        return storage.cost


_Graph = dict[Candidate, dict[Candidate, None]]

#: The default policy counts the evicted ancestors of a storage up to the average cost of this many
#: evicted storages. Visiting more ancestors for each choice would take longer than recomputing them
#: (55 s for a loop of 2,000 LSTM steps in 10 % of its memory). In 24 ordinary models, no storage
#: has so many evicted ancestors.
MOST_ANCESTORS = 1000


class Exact(Neighborhood):
    """The storage's own cost c0 plus the exact cost of its evicted neighborhood e*(s).

    The class maintains the graph of evicted storages. When storages return to memory, the cost of
    every storage whose neighborhood contained them may fall. It falls by at most their cost and the
    cost of the evicted storages that were reached through them.

    Args:
        counted: Count all evicted neighbors, only the ancestors, or "capped": the ancestors up to
            the average cost of 1,000 evicted storages, and the descendants up to 2/3 of c0.
    """

    def __init__(self, *, counted: Literal["all", "ancestors", "capped"] = "all") -> None:
        self._counted: Final = counted
        self._up: _Graph = {}  # the evicted parents of each evicted storage
        self._down: _Graph = {}  # the evicted children of each evicted storage
        # Storages that returned to memory after the last `cost_decreases`, each with its parents at
        # that time. They may have left the graph since then.
        self._returned: dict[Candidate, tuple[Candidate, ...]] = {}
        # For each storage, how far its cost may have fallen because evicted descendants left the
        # graph.
        self._lost: dict[Candidate, float] = {}
        self._asked = 0  # number of costs computed so far
        # value of `_asked` at the time when each storage was evicted
        self._since: dict[Candidate, int] = {}
        self._evictions = 0  # number of evictions so far
        self._evicted_cost: Nanoseconds = 0  # sum of the costs of the storages of all evictions
        # With "capped", the most (ns) that the ancestors of a storage add to its cost. This limit
        # only grows: if it fell, costs would fall that `cost_decreases` does not report.
        self._most_above: Nanoseconds = 0

    def cost(self, storage: Candidate) -> Nanoseconds:
        self._asked += 1
        total = self.again(storage)
        if self._counted == "all":
            total += _sum(_reach(self._down, storage.children()))
        elif self._counted == "capped":
            total += _sum_within(self._down, storage.children(), 2 * storage.cost // 3)
        return total

    def again(self, storage: Candidate) -> Nanoseconds:
        if self._counted == "capped":
            return storage.cost + _sum_within(self._up, storage.parents(), self._most_above)
        return storage.cost + _sum(_reach(self._up, storage.parents()))

    def evicted(self, storage: Candidate) -> None:
        # True if `cost_decreases` has not yet reported that the storage returned. In this case
        # computed costs may still include the cost of the storage.
        seen = self._returned.pop(storage, None) is not None
        if storage not in self._since:
            self._since[storage] = -1 if seen else self._asked
            self._raise_most_above(storage.cost)
        self._up[storage] = {p: None for p in storage.parents() if p in self._up}
        self._down[storage] = {c: None for c in storage.children() if c in self._down}
        for parent in self._up[storage]:
            self._down[parent][storage] = None
        for child in self._down[storage]:
            self._up[child][storage] = None

    def _raise_most_above(self, cost: Nanoseconds) -> None:
        """Raise `_most_above` to the average cost of `MOST_ANCESTORS` evicted storages."""
        self._evictions += 1
        self._evicted_cost += cost
        most = self._evicted_cost
        if self._evictions > MOST_ANCESTORS:
            most = most // self._evictions * MOST_ANCESTORS
        self._most_above = max(self._most_above, most)

    def returned(self, storage: Candidate) -> None:
        # If no cost was computed while the storage was evicted, no computed cost includes it.
        if self._remove(storage) < self._asked:
            self._returned[storage] = tuple(storage.parents())

    def forgotten(self, storage: Candidate) -> None:
        lost = storage.cost + self._lost.pop(storage, 0.0)
        # If this storage has evicted children, its ancestors may have reached them only through it.
        # How far the costs of the ancestors fall is unknown then, so the bound is infinite.
        if self._down[storage]:
            lost = math.inf
            for child in self._down[storage]:
                self._returned[child] = tuple(child.parents())
        self._remove(storage)
        for parent in storage.parents():
            self._lost[parent] = self._lost.get(parent, 0.0) + lost

    def repriced(self, storage: Candidate) -> None:
        if storage in self._up:
            self.evicted(storage)

    def _remove(self, storage: Candidate) -> int:
        """Remove `storage` from the graph of evicted storages.

        Returns:
            The value of `_asked` (number of costs computed) when the storage was evicted.
        """
        for parent in self._up.pop(storage):
            del self._down[parent][storage]
        for child in self._down.pop(storage):
            del self._up[child][storage]
        return self._since.pop(storage)

    def cost_decreases(self) -> Iterable[tuple[Candidate, float]]:
        returned_now, lost = self._returned, self._lost
        if not returned_now and not lost:
            return
        self._returned, self._lost = {}, {}
        nearest = [parent for parents in returned_now.values() for parent in parents]
        above = _reach(self._up, (*nearest, *lost))
        below = _reach(self._down, (c for s in returned_now for c in s.children()))
        fall = _sum(returned_now) + sum(lost.values())
        # Upper bounds of the decrease. The cost of an ancestor falls at most by the costs of the
        # storages that are in memory again (`returned_now`) and of the evicted ones below them. The
        # cost of a descendant falls at most by the costs of the former and of those above them.
        loss_above, loss_below = fall + _sum(below), fall + _sum(above)
        if self._counted != "ancestors":
            border = (s for member in above for s in member.parents())
            for storage in dict.fromkeys((*nearest, *border, *lost)):
                yield storage, loss_above
        border = (
            s for group in (returned_now, below) for member in group for s in member.children()
        )
        for storage in dict.fromkeys(border):
            yield storage, loss_below


def _reach(graph: _Graph, start: Iterable[Candidate]) -> dict[Candidate, None]:
    """Return all storages of `graph` that can be reached from `start`, including `start`."""
    stack = [storage for storage in start if storage in graph]
    seen = dict.fromkeys(stack)
    while stack:
        for other in graph[stack.pop()]:
            if other not in seen:
                seen[other] = None
                stack.append(other)
    return seen


def _sum(storages: Iterable[Candidate]) -> Nanoseconds:
    """Return the total cost (ns) of `storages`."""
    return sum([storage.cost for storage in storages])


def _sum_within(graph: _Graph, start: Iterable[Candidate], most: Nanoseconds) -> Nanoseconds:
    """Return the total cost of the storages that `_reach` finds, or `most` if that is less."""
    seen = dict.fromkeys(storage for storage in start if storage in graph)
    stack = [*seen]
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
    """A node of the union-find forest. The root of a tree stores the total cost of its class."""

    __slots__ = ("border", "fall", "sum", "up")

    def __init__(self) -> None:
        self.up: _Class | None = None  # parent node; None: this is the root (representative)
        self.sum: Nanoseconds = 0  # total cost (ns) of the storages in the class
        self.fall: Nanoseconds = 0  # how far the sum fell since the last `cost_decreases`
        # resident neighbors of the class, and former neighbors
        self.border: dict[Candidate, None] = {}


class Classes(Neighborhood):
    """c0 plus the cost of e*(s), approximated by union-find (h_DTR^eq, appendix C.2 of the paper).

    Evicted storages that are neighbors form a class, which stores the sum of their costs. The cost
    of a resident storage includes the sums of all classes that are its neighbors. When a storage
    returns to memory, its cost is subtracted from its class, but the class is not split. This is
    the paper's approximation.
    """

    remembers = True

    def __init__(self) -> None:
        self._node: dict[Candidate, _Class] = {}  # node of each evicted storage
        # Cost that each evicted storage will subtract from its class when it returns.
        self._owed: dict[Candidate, Nanoseconds] = {}
        self._fallen: dict[_Class, None] = {}  # classes whose sum fell since last `cost_decreases`
        # Storages that may have lost a neighboring class, so that their cost fell.
        self._detached: dict[Candidate, None] = {}

    def cost(self, storage: Candidate) -> Nanoseconds:
        total = storage.cost
        for representative in self._adjacent(storage):
            representative.border[storage] = None
            total += representative.sum
        return total

    def again(self, storage: Candidate) -> Nanoseconds:
        return self.cost(storage)

    def evicted(self, storage: Candidate) -> None:
        adjacent = self._adjacent(storage)
        merged = max(adjacent, key=lambda other: len(other.border), default=None) or _Class()
        for other in adjacent:
            if other is not merged:
                other.up = merged
                merged.sum += other.sum
                merged.fall += other.fall
                merged.border.update(other.border)
                other.border.clear()
        merged.sum += storage.cost
        self._node[storage] = merged
        self._owed[storage] = storage.cost
        for neighbor in (*storage.parents(), *storage.children()):
            if neighbor.resident:
                merged.border[neighbor] = None

    def returned(self, storage: Candidate) -> None:
        if storage in self._node:
            representative = self._find(self._node.pop(storage))
            owed = self._owed.pop(storage)
            representative.sum -= owed
            representative.fall += owed
            self._fallen[representative] = None
            self._detached.update(dict.fromkeys((*storage.parents(), *storage.children())))

    def forgotten(self, storage: Candidate) -> None:
        self.returned(storage)

    def cost_decreases(self) -> Iterable[tuple[Candidate, float]]:
        for representative in {self._find(node): None for node in self._fallen}:
            for storage in representative.border:
                yield storage, representative.fall
            representative.fall = 0
        self._fallen.clear()
        for storage in self._detached:
            yield storage, math.inf
        self._detached.clear()

    def _adjacent(self, storage: Candidate) -> list[_Class]:
        """Return the union-find classes that contain parents or children of `storage`."""
        found: dict[_Class, None] = {}
        for neighbor in (*storage.parents(), *storage.children()):
            if neighbor in self._node:
                found[self._find(self._node[neighbor])] = None
        return list(found)

    def _find(self, node: _Class) -> _Class:
        """Return the representative of the class of `node`, and shorten the path to it."""
        representative = node
        while representative.up is not None:
            representative = representative.up
        while node is not representative:
            following = node.up
            assert following is not None
            node.up, node = representative, following
        return representative
