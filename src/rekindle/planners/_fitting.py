"""Fit a sequence into the budget: evict the items that cost least, one gap after the other.

A gap of an item lies between two of its reads. While some step exceeds the budget, items that are
resident there but not read there are candidates. A candidate can be evicted after the read before
and recomputed for the read after. The cost is that of the recomputed nodes. The relief is the sum,
over the steps of the gap, of the item's bytes, each at most the excess of the step. The gap with
the lowest cost for its relief is closed. This is the greedy rule for covering programs (Chvatal
1979), except that costs change when ancestors are evicted.

In a program with many values, a round closes several gaps, while the excess keeps falling. The
cheapest comes first, each at its price after the previous ones (the lazy greedy algorithm, Minoux
1978: prices for relief only rise).

An evicted item is recomputed as late as possible: just before its reader. If the recomputation
needs more memory than is free there, it moves to the nearest earlier moment with room for it. For
tight budgets this makes plans possible at all (a U-Net at a quarter of its activations needs it).

The search starts from keep-all and from solutions of relaxations that do not fit. To find better
plans, it also starts from the best one without a random part of its recomputations, at slightly
changed prices.
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

# With a tight budget, closing a gap can open another one, which closes the first one again, and so
# on without end. So while the total excess does not fall, each eviction raises the price of its
# item by the factor _DEARER, which ends such cycles. After _PATIENCE such evictions the search
# fails.
_PATIENCE = 200
_DEARER = 1.25
_NOISE = 0.3  # relative noise on a price, so that gaps of similar prices change places
_SHARES = (0.1, 0.3, 0.6)  # shares of the best plan's recomputations that `shake` removes
_MOMENTS = 12  # most moments that are tried for a recomputation without room
_ROUND = 32  # a round evicts at most one of so many values at the worst step


@final
class Fitter:
    """Search for sequences that fit one budget. `left()` returns the seconds that remain."""

    def __init__(self, problem: Problem, budget: Bytes, left: Callable[[], float]) -> None:
        self.problem = problem
        self.budget = budget
        self.left = left

    def fit(
        self, line: Timeline, most: float = float("inf"), rng: random.Random | None = None
    ) -> Timeline | None:
        """Make a sequence fit by evicting more.

        Args:
            line: The sequence.
            most: The search fails when the cost (ns) reaches this value.
            rng: A source of noise on prices. None: no noise.

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
        """Search from `best` without a random part of its recomputations.

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
        except ValueError:  # an in-place write takes over the memory of an item in its gap
            return None
        return self.fit(line, best.cost, rng)


class _Offer(NamedTuple):
    """Gap of an item between two steps; `nodes` have to be recomputed before the second."""

    copy: Copy
    start: int
    end: int
    nodes: list[int]


@final
class _Gaps:
    """The gaps of `line` that span its worst step, which exceeds the budget most."""

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
        self.starts: dict[int, list[int]] = {}  # the first steps of the lives of each item
        self.ends: dict[int, list[int]] = {}  # the last steps
        for copy in line.copies:
            self.starts.setdefault(copy.item, []).append(copy.start)
            self.ends.setdefault(copy.item, []).append(copy.end)
        self.closed: dict[int, tuple[int, int]] = {}  # the gap of each item that is evicted
        self.wanted: dict[int, list[int]] = {}  # steps where recomputations read an item
        self.nodes: dict[int, list[int]] = {}  # nodes to recompute before each step

    def close(self, *, several: bool) -> tuple[list[int], Timeline] | None:
        """Close the cheapest gaps.

        Args:
            several: Close several gaps in this round.

        Returns:
            The items of these gaps and the new sequence, or None if no gap can be closed.
        """
        present = self._present()
        most = max(1, len(present) // _ROUND) if several else 1
        reads = self._reads(present)
        queue: list[tuple[float, int, int, _Offer]] = []
        for number, copy in enumerate(present):
            self._offer(queue, number, copy, reads)
        while queue and len(self.closed) < most and self.over[self.worst] > 0:
            _, number, closed, offer = heapq.heappop(queue)
            if closed < len(self.closed):  # other gaps were closed since, so the price is stale
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
        """Put the gap of `copy` into the queue, by its price, if it can be closed."""
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
        """Close a gap: note its recomputations, and update excess and memory."""
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
        """Return the price of a gap: cost over relief, raised for recently evicted items."""
        cost = 1 + sum(self.problem.cost[node] for node in nodes)
        relief = np.minimum(self.over[start + 1 : end], self.problem.nbytes[item]).sum()
        price = _DEARER ** self.lately[item] * cost / float(relief)
        return price * (1 + _NOISE * self.rng.random()) if self.rng else price

    def _present(self) -> list[Copy]:
        """Return the copies that are resident at the worst step, but not read or made there."""
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
        """Return the steps that read each item of `copies`."""
        present = {copy.item for copy in copies}
        found: dict[int, list[int]] = {}
        for step, node in enumerate(self.line.steps):
            for item in self.problem.reads[node]:
                if item in present:
                    found.setdefault(item, []).append(step)
        return found

    def _gap(self, copy: Copy, reads: list[int]) -> tuple[int, int]:
        """Return the last read before the worst step, and the next one, or -1 without one."""
        start, end = copy.start, -1
        for step in reads:
            if copy.start <= step < self.worst:
                start = step
            elif self.worst < step <= copy.end:
                end = step
                break
        return start, end

    def _held(self, item: int, start: int, end: int) -> bool:
        """Return True if a hold keeps the item resident in the gap."""
        first = self.line.first
        holds = self.problem.holds_of.get(item, ())
        return any(first[hold.first] < end and first[hold.last] > start for hold in holds)

    def _again(self, item: int, at: int) -> list[int] | None:
        """Return the nodes that recompute `item` before step `at`, or None if impossible."""
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
        """Return True if `item` is resident before step `at`, or is recomputed there."""
        start, end = self.closed.get(item, (at, at))
        if start < at < end:
            return False
        life = bisect_left(self.starts.get(item, ()), at) - 1
        return life >= 0 and at <= self.ends[item][life]

    def _where(self, item: int, end: int, nodes: list[int]) -> tuple[int, list[int]]:
        """Find the latest moment in the gap with room for `nodes`, or with the least excess.

        Returns:
            The step before which to recompute, and the nodes to recompute there.
        """
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
        """Bytes that stay resident between each step and the one before it."""
        change = np.zeros(len(self.line.steps) + 2, dtype=np.int64)
        for copy in self.line.copies:
            change[copy.start + 1] += self.problem.nbytes[copy.item]
            change[copy.end + 1] -= self.problem.nbytes[copy.item]
        return np.cumsum(change) + self.problem.fixed

    def _transient(self, nodes: list[int]) -> Bytes:
        """Return the peak (bytes) of the results of `nodes`, each freed after its last reader."""
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
