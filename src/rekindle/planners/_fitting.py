"""Fits a sequence into the budget: lets go of what costs least, one gap after the other.

While the memory of some step is over the budget: whatever is there, and is not read in that step,
could be let go after its last reader before and be made again for its next one. That costs the
nodes to run again, and relieves all steps of the gap, each by the bytes of the item or by what it
is over the budget. The gap with the least cost for its relief is taken: the greedy rule for
covering programs (Chvatal 1979), where costs change as ancestors go.

In a program with many values a round closes several gaps, as long as that goes well. They are taken
in the same way, cheapest first, each at its price after those before it (the lazy greedy algorithm,
Minoux 1978: prices for relief only rise).

What is let go comes back as late as it can: just before its reader, or, if running its nodes takes
more memory than there is then, at the nearest moment before with room for them. Where memory is
tight, that is what makes plans possible (a U-Net at a quarter of its activations has none without).

Sequences to begin with are keep-all, the solutions of relaxations that do not fit, and, to find
better plans, the best one without a random part of its recomputations, at prices a little off.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from rekindle._types import Bytes
from rekindle.planners._fill import fill
from rekindle.planners._problem import Problem
from rekindle.planners._sequence import Copy, Timeline, prune, timeline

# Where it is tight, a gap that closes opens another one, which closes that one again, and so on for
# ever. So while the sum of what is over the budget does not fall, an item gets dearer each time
# that it is let go, which ends such circles, and after that many times all together there is
# no plan to be had.
_PATIENCE = 200
_DEARER = 1.25
_NOISE = 0.3  # on a price: gaps whose prices are that near change places
_SHARES = (0.1, 0.3, 0.6)  # of the recomputations of the best plan that are given up to shake it
_MOMENTS = 12  # at which a recomputation without room is tried
_ROUND = 32  # of the values at the worst step, one of so many is let go in a round


@final
class Fitter:
    """For one problem and one budget. `left()` is the time left, in seconds."""

    def __init__(self, problem: Problem, budget: Bytes, left: Callable[[], float]) -> None:
        self.problem = problem
        self.budget = budget
        self.left = left

    def fit(
        self, line: Timeline, most: float = float("inf"), rng: random.Random | None = None
    ) -> Timeline | None:
        """A plan that begins with what `line` recomputes; None: none found that costs less than
        `most`. `rng` disturbs the prices."""
        least, lately = np.inf, Counter[int]()
        while line.cost < most and self.left() > 0:
            over = np.maximum(line.memory - self.budget, 0)
            total = int(over.sum())
            if not total:
                return timeline(self.problem, fill(line, self.budget))
            falls = total < least
            if falls:
                least = total
                lately.clear()
            gaps = _Gaps(line, over, self.budget, lately, rng)
            closed = gaps.close(several=falls) if lately.total() <= _PATIENCE else None
            if closed is None:
                return None
            items, line = closed
            lately.update(items)
        return None

    def shake(self, best: Timeline, rng: random.Random) -> Timeline | None:
        """A plan that costs less than `best` and has a part of its recomputations, or None."""
        share = rng.choice(_SHARES)
        steps = [
            node
            for step, node in enumerate(best.steps)
            if step == best.first[node] or rng.random() > share
        ]
        try:
            line = timeline(self.problem, prune(self.problem, steps))
        except ValueError:  # an item of these is lent to an in-place write between
            return None
        return self.fit(line, best.cost, rng)


class _Offer(NamedTuple):
    """The copy could go between two steps, if `nodes` run again before the second."""

    copy: Copy
    start: int
    end: int
    nodes: list[int]


@final
class _Gaps:
    """The gaps of `line` at the step that is most over the budget."""

    def __init__(
        self,
        line: Timeline,
        over: NDArray[np.int64],
        budget: Bytes,
        lately: Counter[int],
        rng: random.Random | None,
    ) -> None:
        self.line = line
        self.problem = line.problem
        self.over = over
        self.budget = budget
        self.lately = lately
        self.rng = rng
        self.worst = int(over.argmax())
        self.starts: dict[int, list[int]] = {}  # of the lives of each item, and their ends
        self.ends: dict[int, list[int]] = {}
        for copy in line.copies:
            self.starts.setdefault(copy.item, []).append(copy.start)
            self.ends.setdefault(copy.item, []).append(copy.end)
        self.closed: dict[int, tuple[int, int]] = {}  # of each item that goes: from where to where
        self.wanted: dict[int, list[int]] = {}  # where what comes back reads an item
        self.nodes: dict[int, list[int]] = {}  # that run again before each step

    def close(self, *, several: bool) -> tuple[list[int], Timeline] | None:
        """The items whose gaps are the cheapest for their relief, and the sequence without them
        there."""
        present = self._present()
        most = max(1, len(present) // _ROUND) if several else 1
        reads = self._reads(present)
        queue: list[tuple[float, int, int, _Offer]] = []
        for number, copy in enumerate(present):
            self._offer(queue, number, copy, reads)
        while queue and len(self.closed) < most and self.over[self.worst] > 0:
            _, number, closed, offer = heapq.heappop(queue)
            if closed < len(self.closed):  # others went since
                self._offer(queue, number, offer.copy, reads)
            else:
                self._close(offer)
        if not self.closed:
            return None
        steps = [
            new
            for at, node in enumerate(self.line.steps)
            for new in (*self.nodes.get(at, ()), node)
        ]
        return [*self.closed], timeline(self.problem, prune(self.problem, steps))

    def _offer(
        self,
        queue: list[tuple[float, int, int, _Offer]],
        number: int,
        copy: Copy,
        reads: dict[int, list[int]],
    ) -> None:
        """Puts the gap of `copy` into the queue, by its price, if it can go."""
        known, wanted = reads.get(copy.item, []), self.wanted.get(copy.item)
        start, end = self._gap(copy, sorted(known + wanted) if wanted else known)
        if end < 0 or self._held(copy.item, start, end):
            return
        nodes = self._again(copy.item, end)
        if nodes is not None:
            price = self._price(copy.item, start, end, nodes)
            offer = _Offer(copy, start, end, nodes)
            heapq.heappush(queue, (price, number, len(self.closed), offer))

    def _close(self, offer: _Offer) -> None:
        item = offer.copy.item
        at, nodes = self._where(item, offer.end, offer.nodes)
        self.closed[item] = offer.start, at
        others = self.nodes.get(at)
        self.nodes[at] = sorted({*others, *nodes}) if others else nodes
        for node in nodes:
            for source in self.problem.reads[node]:
                self.wanted.setdefault(source, []).append(at)
        self.between[offer.start + 1 : at + 1] -= self.problem.nbytes[item]
        relief = self.over[offer.start + 1 : at]
        np.maximum(relief - self.problem.nbytes[item], 0, out=relief)

    def _price(self, item: int, start: int, end: int, nodes: list[int]) -> float:
        cost = 1 + sum(self.problem.cost[node] for node in nodes)
        relief = np.minimum(self.over[start + 1 : end], self.problem.nbytes[item]).sum()
        price = _DEARER ** self.lately[item] * cost / float(relief)
        return price * (1 + _NOISE * self.rng.random()) if self.rng else price

    def _present(self) -> list[Copy]:
        """Copies that are there at the worst step, and have nothing to do with it."""
        problem, node = self.problem, self.line.steps[self.worst]
        own = {*problem.reads[node], *problem.makes[node]}
        return [
            copy
            for copy in self.line.copies
            if copy.start < self.worst < copy.end
            and copy.item not in own
            and problem.nbytes[copy.item]
        ]

    def _reads(self, copies: list[Copy]) -> dict[int, list[int]]:
        """The steps that read what there are `copies` of."""
        present = {copy.item for copy in copies}
        found: dict[int, list[int]] = {}
        for step, node in enumerate(self.line.steps):
            for item in self.problem.reads[node]:
                if item in present:
                    found.setdefault(item, []).append(step)
        return found

    def _gap(self, copy: Copy, reads: list[int]) -> tuple[int, int]:
        """The readers before and after the worst step; the second -1 where there is none."""
        start, end = copy.start, -1
        for step in reads:
            if copy.start <= step < self.worst:
                start = step
            elif self.worst < step <= copy.end:
                end = step
                break
        return start, end

    def _held(self, item: int, start: int, end: int) -> bool:
        first = self.line.first
        holds = self.problem.holds_of.get(item, ())
        return any(first[hold.first] < end and first[hold.last] > start for hold in holds)

    def _again(self, item: int, at: int) -> list[int] | None:
        """The nodes that make `item` again before step `at`; None where that cannot be."""
        problem = self.problem
        nodes: list[int] = []
        made: set[int] = set()
        stack = [item]
        while stack:
            node = problem.maker[stack[-1]]
            if node in made:
                stack.pop()
                continue
            if not problem.replayable[node]:
                return None
            missing = [
                source
                for source in problem.reads[node]
                if problem.maker[source] not in made and not self._alive(source, at)
            ]
            if missing:
                stack.append(max(missing))
            else:
                made.add(node)
                nodes.append(node)
        return nodes

    def _alive(self, item: int, at: int) -> bool:
        """Whether it is there before step `at`, or comes back then."""
        start, end = self.closed.get(item, (at, at))
        if start < at < end:
            return False
        life = bisect_left(self.starts.get(item, ()), at) - 1
        return life >= 0 and at <= self.ends[item][life]

    def _where(self, item: int, end: int, nodes: list[int]) -> tuple[int, list[int]]:
        """The latest moment in the gap with room for `nodes`, or that with the least excess."""
        size, memory = self.problem.nbytes[item], self.line.memory
        before = self.between
        least, chosen, tried = np.inf, (end, nodes), 0
        for at in range(end, self.worst, -1):
            if at < end and memory[at] + size > self.budget:
                break  # there is no room for the item itself
            lull = at == end or (before[at] <= before[at + 1] and before[at] < before[at - 1])
            found = self._again(item, at) if lull else None
            if found is None:
                continue
            need = int(before[at]) + self._transient(found)
            if need < least:
                least, chosen = need, (at, found)
            tried += 1
            if need <= self.budget or tried > _MOMENTS:
                break
        return chosen

    @cached_property
    def between(self) -> NDArray[np.int64]:
        """Bytes that stay from the step before each step to that step."""
        change = np.zeros(len(self.line.steps) + 2, dtype=np.int64)
        for copy in self.line.copies:
            change[copy.start + 1] += self.problem.nbytes[copy.item]
            change[copy.end + 1] -= self.problem.nbytes[copy.item]
        return np.cumsum(change) + self.problem.fixed

    def _transient(self, nodes: list[int]) -> Bytes:
        """The most that `nodes` make at once, where each result goes after its last reader."""
        problem = self.problem
        last: dict[int, int] = {}
        for step, node in enumerate(nodes):
            for item in (*problem.makes[node], *problem.reads[node]):
                last[item] = step
        made: set[int] = set()
        memory = peak = 0
        for step, node in enumerate(nodes):
            made.update(problem.makes[node])
            memory += sum(problem.nbytes[item] for item in problem.makes[node])
            peak = max(peak, memory)
            for item in {*problem.makes[node], *problem.reads[node]}:
                if item in made and last[item] == step:
                    memory -= problem.nbytes[item]
        return peak
