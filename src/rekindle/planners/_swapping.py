"""Search for plans that recompute and swap.

A plan is a sequence of nodes and swap-ins (`_sequence.py`). `_carrier.py` starts each copy to or
from the host as early as memory allows, and `rekindle.schedule.Timeline` computes the time. The
search starts from

- known schedules: simulated runs of the online engine, once unchanged and once with earlier copies;
- the best sequence that only recomputes;
- sequences that are planned for more memory than the budget and swap the excess (`_squeeze.py`):
  the faster the transfer, the larger the best excess.

Next, the search changes the best of these sequences. Recomputations become swap-ins, swap-ins
become recomputations, and resident items are swapped out to make room for others. Only changes that
make the program end sooner are kept, so the plan is never slower than the start of the search.
`_swap_bound.py` computes the lower bound.
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

_ALONE: Final = 0.15  # share of the time limit for the search for a plan that only recomputes
_WIDER: Final = 0.03  # share of the time limit for each plan for more memory than the budget
_BOUND: Final = 0.15  # share of the time limit for the computation of the lower bound

# The search first tries to swap these shares of the memory that is missing to keep everything.
_PARTS: Final = (1.0, 0.5, 0.25, 0.125)
# Then it tries, in this order, a share above (1) or below (-1) the best share so far.
_SIDES: Final = (1, -1, 1, -1)
_MARGINS: Final = (1.0, 0.9)  # shares of the budget to fill; swap-ins that start early use the rest
_MOST_AT_ONCE: Final = 64  # most edits of a sequence in one attempt
_AGAIN: Final = 4  # number of edits to make at once after an attempt with a single edit failed
_PATIENCE: Final = 300  # failed attempts after which the search ends

Alone = Callable[[Bytes, float], Sequence[int] | None]
"""Function of a budget and seconds that returns a fitting sequence without swaps, or None."""


@final
class Mixer:
    """Search for the best mixture of recomputing and swapping.

    Args:
        search: The state of the search.
        alone: A function of (budget, seconds) that plans without swapping.
        gap: Stop when cost and bound are this close, as a share of the cost.
        seed: The seed of the random choices.
    """

    def __init__(self, search: Search, alone: Alone, gap: float, seed: int) -> None:
        self.search = search
        self.problem = search.problem
        self._alone = alone
        self._gap = gap
        self._rng = random.Random(seed)

    def run(self, known: Iterable[Schedule], warm: Iterable[Sequence[int]]) -> None:
        """Run the whole search.

        Args:
            known: Schedules to start from, such as simulated runs.
            warm: Sequences to start from.
        """
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
        """Return True if the best plan is close enough to the lower bound, or time is over."""
        cost = self.search.cost
        near = cost is not None and cost - self.search.bound <= self._gap * cost
        return near or self.search.left <= 0

    def _try(self, steps: Sequence[int] | None, note: str) -> Nanoseconds | None:
        """Keep a sequence as the best one, if it is valid, fits, and ends earliest so far.

        Returns:
            The end (ns) of the sequence, or None if the sequence is invalid or does not fit.
        """
        if steps is None:
            return None
        try:
            line = settle(timeline(self.problem, prune(self.problem, steps)))
        except ValueError:
            return None
        return self.search.time(line, note) if line.peak <= self.search.budget else None

    def _widen(self) -> None:
        """Try plans for more memory than the budget that swap the excess.

        The excess is a share of the memory that is missing to keep everything. With a share of 1
        nothing is recomputed. Four distant shares come first, and next shares between the best one
        and its neighbors.
        """
        found: dict[float, Nanoseconds] = {}
        if self.search.cost is not None:
            found[0.0] = self.search.cost
        for part in _PARTS:
            self._squeezed(part, found)
        for side in _SIDES:
            best = min(found, key=lambda part: found[part], default=1.0)
            farther = [part for part in found if (part - best) * side > 0]
            if farther and not self._done():
                nearest = min(farther, key=lambda part: abs(part - best))
                self._squeezed((best + nearest) / 2, found)

    def _squeezed(self, part: float, found: dict[float, Nanoseconds]) -> None:
        """Try to swap the share `part` of the memory that is missing to keep everything.

        The end (ns) of the fastest plan with this share is stored in `found`.
        """
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
        """Raise the lower bound of the search to the bound of the cut relaxation with copies."""
        search, swap = self.search, self.search.swap
        assert swap is not None
        seconds = min(search.left, _BOUND * search.time_limit)
        bandwidth = Bandwidth(swap.out_bytes_per_s, swap.in_bytes_per_s)
        bound = swap_bound(self.problem, search.budget, bandwidth, time_limit=seconds)
        if bound is not None:
            search.raise_bound(bound, "relaxation with copies")

    def _improve(self) -> None:
        """Edit the best sequence as long as that makes it faster, by one or many edits at once."""
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
        """Make about `number` of the most promising edits of the kind `kind` in `line`.

        Returns:
            True if the best plan got faster.
        """
        search = self.search
        before = search.best_ns
        noisy = [(edit.promise * self._rng.random(), edit) for edit in edits]
        noisy.sort(key=lambda pair: -pair[0])
        steps = changed(line.steps, [edit for _, edit in noisy[:number]])
        if self._try(steps, kind) is not None and search.best_ns >= before:
            # The edits may have freed memory in which other results can stay, instead of being made
            # again.
            room = timeline(self.problem, prune(self.problem, steps))
            self._try(changed(room.steps, keep_instead(room, search.budget)), f"{kind}, keep")
        return search.best_ns < before
