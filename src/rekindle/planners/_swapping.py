"""Plans that recompute and swap: from the best of both alone to a better mixture.

Sequences in which items also come back by copies (`_sequence.py`), written down with each copy as
early as memory allows (`_carrier.py`) and timed by the one timeline. The search begins with

- what is known: runs of the online engine, as they are and with their copies put in better places;
- the best sequence that only recomputes;
- sequences that recompute as if there were more memory than there is, up to all that is wanted, and
  swap for the difference (`_squeeze.py`): the faster the host, the more pays,

and then changes the best of them: recomputations into copies, copies into recomputations, what
stayed into copies that make room for others. What makes the program end sooner is kept, so that a
plan is never slower than what the search began with. The bound is that of `_swap_bound.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._base import Search
from rekindle.planners._edits import KINDS, Edit, changed, keep_instead
from rekindle.planners._relaxation import Bandwidth
from rekindle.planners._sequence import Timeline, prune, settle, timeline
from rekindle.planners._squeeze import squeeze
from rekindle.planners._swap_bound import swap_bound
from rekindle.planners.given import steps_of
from rekindle.schedule import Schedule

# Shares of the time limit.
_ALONE: Final = 0.15  # for a plan that only recomputes
_WIDER: Final = 0.03  # for each one with more memory
_BOUND: Final = 0.15

_PARTS: Final = (1.0, 0.5, 0.25, 0.125)  # of the memory that is missing
_SIDES: Final = (1, -1, 1, -1)  # of the best part: where to look next
_MARGINS: Final = (1.0, 0.9)  # of the budget, so that copies can come back ahead
_MOST_AT_ONCE: Final = 64  # changes
_AGAIN: Final = 4  # changes at once, after a single one failed
_PATIENCE: Final = 300  # changes in vain after which the search ends

Alone = Callable[[Bytes, float], Sequence[int] | None]
"""From a budget and so many seconds: a sequence that fits, and only recomputes."""


@final
class Mixer:
    """One search. `gap`: what is so near to the bound, as a share of the cost, is good enough."""

    def __init__(self, search: Search, alone: Alone, gap: float, seed: int) -> None:
        self.search = search
        self.problem = search.problem
        self._alone = alone
        self._gap = gap
        self._rng = random.Random(seed)

    def run(self, known: Iterable[Schedule], warm: Iterable[Sequence[int]]) -> None:
        search = self.search
        self._try(range(len(self.problem)), "keep all")
        if search.solved or search.impossible:
            return
        for schedule in known:
            search.take(schedule, "known")
            self._try(steps_of(self.problem, schedule), "known, copied earlier")
        for steps in warm:
            self._try(steps, "warm start")
        self._try(self._alone(search.budget, _ALONE * search.time_limit), "recomputation alone")
        self._widen()
        self._prove()
        self._improve()

    def _done(self) -> bool:
        cost = self.search.cost
        near = cost is not None and cost - self.search.bound <= self._gap * cost
        return near or self.search.left <= 0

    def _try(self, steps: Sequence[int] | None, note: str) -> Nanoseconds | None:
        """When a sequence ends; None if it does not fit, or brings back what stays."""
        if steps is None:
            return None
        try:
            line = settle(timeline(self.problem, prune(self.problem, steps)))
        except ValueError:
            return None
        return self.search.time(line, note) if line.peak <= self.search.budget else None

    def _widen(self) -> None:
        """Plans for more memory, with copies for the difference: a part of what is missing.

        All of it is to swap alone. First some parts far apart, then between the best one and its
        neighbours.
        """
        found: dict[float, Nanoseconds] = {}
        if self.search.cost is not None:
            found[0.0] = self.search.cost
        for part in _PARTS:
            self._squeezed(part, found)
        for side in _SIDES:
            best = min(found, key=lambda part: found[part], default=1.0)
            beside = [part for part in found if (part - best) * side > 0]
            if beside and not self._done():
                nearest = min(beside, key=lambda part: abs(part - best))
                self._squeezed((best + nearest) / 2, found)

    def _squeezed(self, part: float, found: dict[float, Nanoseconds]) -> None:
        """Enters when the fastest plan found with so much more memory ends, if there is one."""
        search, problem = self.search, self.problem
        more = int(part * (problem.keep_all_peak - search.budget))
        steps: Sequence[int] | None = range(len(problem))
        if self._done():
            return
        if part < 1:
            steps = self._alone(search.budget + more, _WIDER * search.time_limit)
        if steps is None:
            return
        line = timeline(problem, prune(problem, steps))
        for margin in _MARGINS:
            note = f"{part:.0%} of what is missing swapped"
            end = self._try(squeeze(line, int(margin * search.budget)), note)
            if end is not None:
                found[part] = min(end, found.get(part, end))

    def _prove(self) -> None:
        search, swap = self.search, self.search.swap
        assert swap is not None
        seconds = min(search.left, _BOUND * search.time_limit)
        bandwidth = Bandwidth(swap.out_bytes_per_s, swap.in_bytes_per_s)
        bound = swap_bound(self.problem, search.budget, bandwidth, time_limit=seconds)
        if bound is not None:
            search.raise_bound(bound, "relaxation with copies")

    def _improve(self) -> None:
        """Changes the best sequence, many values at a time or one, while that helps."""
        search = self.search
        at_once = dict.fromkeys(KINDS, _MOST_AT_ONCE)
        failures = 0
        while search.best is not None and failures < _PATIENCE:
            line = search.best
            edits = {kind: find(line) for kind, find in KINDS.items()}
            while search.best is line and failures < _PATIENCE:
                for kind in KINDS:
                    if self._done():
                        return
                    if self._change(line, kind, edits[kind], at_once[kind]):
                        at_once[kind] = min(2 * at_once[kind], _MOST_AT_ONCE)
                        failures = 0
                        break
                    at_once[kind] = at_once[kind] // 4 or _AGAIN
                    failures += 1

    def _change(self, line: Timeline, kind: str, edits: Sequence[Edit], number: int) -> bool:
        """Makes about so many of the most promising changes of a kind. Whether that helped."""
        search = self.search
        before = search.best_ns
        noisy = [(edit.promise * self._rng.random(), edit) for edit in edits]
        noisy.sort(key=lambda pair: -pair[0])
        steps = changed(line.steps, [edit for _, edit in noisy[:number]])
        if self._try(steps, kind) is not None and search.best_ns >= before:
            room = timeline(self.problem, prune(self.problem, steps))  # it may be of use to others
            self._try(changed(room.steps, keep_instead(room, search.budget)), f"{kind}, keep")
        return search.best_ns < before
