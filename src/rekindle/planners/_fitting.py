"""Fit a sequence of nodes into the budget: evict the cheapest items (storages), gap by gap.

A gap of an item is the time between two steps that read the item. Closing a gap means evicting the
item after the first of these reads, and recomputing it for the second read. While some step exceeds
the budget, the gaps that span the worst step are candidates. The cost of a gap is the cost of the
recomputed nodes. The relief of a gap is the bytes by which the eviction reduces the excess, summed
over the steps of the gap. The gap with the lowest price (cost / relief) is closed. This is the
greedy rule for covering programs (Chvatal 1979), except that costs change when ancestors are
evicted.

In a program with many values, one round closes several gaps, as long as the excess keeps falling.
The cheapest gap comes first. The prices of the other gaps are computed again only when they are
needed (the lazy greedy algorithm, Minoux 1978: prices only rise).

An evicted item is recomputed as late as possible: just before its reader. If the recomputation
needs more memory than is free at that step, it moves to the nearest earlier step with enough free
memory. Some tight budgets have no plan without this rule, such as a quarter of a U-Net's
activations.

The search starts from the sequence without evictions, and from solutions of relaxations that exceed
the budget. To find better plans, `shake` removes a random part of the recomputations from the best
plan, and fits the result at slightly changed prices.
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

# With a tight budget, an eviction can force a recomputation that exceeds the budget elsewhere. The
# next eviction there can undo the first one, and so on without end. So while the total excess does
# not fall, each eviction raises the price of its item by the factor _DEARER, which ends such
# cycles. After _PATIENCE evictions without progress the search fails.
_PATIENCE = 200
_DEARER = 1.25
# `shake` raises each price by a random share of up to _NOISE, so that it does not always close the
# gap with the lowest price.
_NOISE = 0.3
_SHARES = (0.1, 0.3, 0.6)  # shares of the best plan's recomputations that `shake` removes
# If a recomputation does not fit just before its reader, this many earlier steps are tried for it.
_MOMENTS = 12
_ROUND = 32  # a round evicts at most 1 / _ROUND of the candidates at the worst step


@final
class Fitter:
    """Search for sequences that fit `budget`. `left()` returns the seconds that remain for it."""

    def __init__(self, problem: Problem, budget: Bytes, left: Callable[[], float]) -> None:
        self.problem = problem
        self.budget = budget
        self.left = left

    def fit(
        self, line: Timeline, most: float = float("inf"), rng: random.Random | None = None
    ) -> Timeline | None:
        """Make a sequence fit the budget by more evictions.

        Args:
            line: The sequence of nodes, as a timeline.
            most: The search fails when the cost (ns) of the sequence reaches this value.
            rng: A random generator for noise on prices. None: no noise.

        Returns:
            A sequence that fits, or None.
        """
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
        """Remove random recomputations from the plan `best`, and make the result fit again.

        Returns:
            A sequence that fits and costs less than `best`, or None.
        """
        share = rng.choice(_SHARES)
        steps = [
            node
            for step, node in enumerate(best.steps)
            if step == best.first[node] or rng.random() > share
        ]
        try:
            line = timeline(self.problem, prune(self.problem, steps))
        except ValueError:  # An in-place write overwrites an item that would have to stay.
            return None
        return self.fit(line, best.cost, rng)


class _Offer(NamedTuple):
    """A gap that can be closed: evict the storage of `copy`, and recompute it later.

    The storage is evicted after step `start`. Step `end` is the next step that reads the storage.
    `nodes` recompute the storage before that step.
    """

    copy: Copy
    start: int
    end: int
    nodes: list[int]


@final
class _Gaps:
    """One round of evictions: the gaps that span the worst step of the sequence `line`.

    A gap is the time between two reads of an item (storage). The worst step is the one that exceeds
    the budget most. `over` is the excess of each step over the budget (bytes).
    """

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
        self.starts: dict[int, list[int]] = {}  # item -> first steps of its periods in memory
        self.ends: dict[int, list[int]] = {}  # item -> last steps of its periods in memory
        for copy in line.copies:
            self.starts.setdefault(copy.item, []).append(copy.start)
            self.ends.setdefault(copy.item, []).append(copy.end)
        # item -> the gap that was closed for the item in this round
        self.closed: dict[int, tuple[int, int]] = {}
        self.wanted: dict[int, list[int]] = {}  # item -> steps at which recomputations read it
        self.nodes: dict[int, list[int]] = {}  # step -> nodes to recompute before it

    def close(self, *, several: bool) -> tuple[list[int], Timeline] | None:
        """Evict the storages of the cheapest gap or gaps, and recompute these storages later.

        Args:
            several: Close several gaps, not only one.

        Returns:
            The storages of these gaps and the new sequence, or None if no gap can be closed.
        """
        present = self._present()
        most = max(1, len(present) // _ROUND) if several else 1
        reads = self._reads(present)
        queue: list[tuple[float, int, int, _Offer]] = []
        for number, copy in enumerate(present):
            self._offer(queue, number, copy, reads)
        while queue and len(self.closed) < most and self.over[self.worst] > 0:
            _, number, closed, offer = heapq.heappop(queue)
            # If other gaps were closed after this price was computed, compute it again.
            if closed < len(self.closed):
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
        """Queue an eviction of the storage of `copy` that lasts through the worst step.

        Nothing is queued if the storage cannot be recomputed for its next reader.
        """
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
        """Apply an eviction: note where its storage is recomputed, and update the memory in use."""
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
        """Return the price of an eviction: its cost divided by the excess memory that it saves.

        The price of a storage that was evicted recently is multiplied by a factor.
        """
        cost = 1 + sum(self.problem.cost[node] for node in nodes)
        relief = np.minimum(self.over[start + 1 : end], self.problem.nbytes[item]).sum()
        price = _DEARER ** self.lately[item] * cost / float(relief)
        return price * (1 + _NOISE * self.rng.random()) if self.rng else price

    def _present(self) -> list[Copy]:
        """Return the periods of storages that are in memory at the worst step, but not used."""
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
        """Return for each storage of `copies` the steps that read the storage."""
        present = {copy.item for copy in copies}
        found: dict[int, list[int]] = {}
        for step, node in enumerate(self.line.steps):
            for item in self.problem.reads[node]:
                if item in present:
                    found.setdefault(item, []).append(step)
        return found

    def _gap(self, copy: Copy, reads: list[int]) -> tuple[int, int]:
        """Return the steps that last read the storage before, and first read it after, the worst.

        The worst step is the one that exceeds the budget most. If no step reads the storage before
        the worst step, the first result is the step that makes the storage. If no step reads it
        after the worst step, the second result is -1.
        """
        start, end = copy.start, -1
        for step in reads:
            if copy.start <= step < self.worst:
                start = step
            elif self.worst < step <= copy.end:
                end = step
                break
        return start, end

    def _held(self, item: int, start: int, end: int) -> bool:
        """Return True if `item` may not be evicted at some step between `start` and `end`.

        That is so while the item is pinned or user-held.
        """
        first = self.line.first
        holds = self.problem.holds_of.get(item, ())
        return any(first[hold.first] < end and first[hold.last] > start for hold in holds)

    def _again(self, item: int, at: int) -> list[int] | None:
        """Return the nodes that recompute `item` before step `at`.

        Returns None if a node that is needed cannot run again.
        """
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
        """Return True if `item` is in memory just before step `at`.

        The gap of the item that was closed in this round counts as an absence.
        """
        start, end = self.closed.get(item, (at, at))
        if start < at < end:
            return False
        life = bisect_left(self.starts.get(item, ()), at) - 1
        return life >= 0 and at <= self.ends[item][life]

    def _where(self, item: int, end: int, nodes: list[int]) -> tuple[int, list[int]]:
        """Find the latest step of a gap at which memory has room to recompute `nodes`.

        If no step has enough room, find the step with the least excess.

        Returns:
            The step before which to recompute, and the nodes to recompute there.
        """
        size, memory = self.problem.nbytes[item], self.line.memory
        before = self.between
        least, chosen, tried = np.inf, (end, nodes), 0
        for at in range(end, self.worst, -1):
            if at < end and memory[at] + size > self.budget:
                break  # At earlier steps, the item does not fit in memory until its reader runs.
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
        """For each step, the bytes that are in memory between the previous step and this step."""
        change = np.zeros(len(self.line.steps) + 2, dtype=np.int64)
        for copy in self.line.copies:
            change[copy.start + 1] += self.problem.nbytes[copy.item]
            change[copy.end + 1] -= self.problem.nbytes[copy.item]
        return np.cumsum(change) + self.problem.fixed

    def _transient(self, nodes: list[int]) -> Bytes:
        """Return the peak memory of the results of `nodes` when these nodes run in order.

        Each result is freed after the last of `nodes` that reads it.
        """
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
