"""The planner that scales, and the default: the cut relaxation, solved again with more cuts.

A round solves the relaxation (`_relaxation.py`) with memory constrained at K moments. Its bound
holds for every schedule. Its solution is decoded into a sequence, always a valid one; if the
sequence fits the budget, it is a plan, and if its cost meets the bound, it is optimal. If it does
not fit, the worst moments become cuts, and the next round begins. K starts at one, the peak of
keep-all, and ends between 1 and about 15: that is why programs of thousands of operators are
planned in seconds, where a program with all moments (Checkmate) takes hours.

Plans on the way there come from `_fitting.py`, which makes keep-all and solutions that do not fit
fit by letting go of more, and from `_repair.py`: overshoots repaired by more cuts, with those
before them fixed, and better plans in the neighbourhood of the best. They matter on programs whose
relaxation has many solutions of nearly the same cost, and where recomputations have little room.

With a host to swap to, plans that only recompute are where `_swapping.py` begins, and the bound is
that of the relaxation with copies (`_swap_bound.py`).

Two programs of known optimum do not need all that: keep-all where it fits, and the homogeneous
chain (`revolve.py`), on which the relaxation is at its weakest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import chain
from typing import final

from rekindle._types import Bytes
from rekindle.planners import chen, revolve
from rekindle.planners._base import Search, Watch, recompute_all
from rekindle.planners._fitting import Fitter
from rekindle.planners._problem import Problem
from rekindle.planners._relaxation import Relaxation, decode
from rekindle.planners._repair import Repairer, worst_moments
from rekindle.planners._result import Plan
from rekindle.planners._sequence import Timeline, timeline
from rekindle.planners._swapping import Mixer
from rekindle.planners.given import steps_of
from rekindle.policies.swap import Swap
from rekindle.schedule import Schedule

# Prices of memory that is kept for long, as a share of the program's cost for the whole budget
# kept to the end: from "decides ties" to "rules the choice".
_PRICES = (0.003, 0.005, 0.01, 0.02, 0.03, 0.1, 0.3)
_MARGINS = (1.0, 0.98, 0.93)
_SHARES = (0.05, 0.1, 0.2, 0.4)
_SHAKES, _SHAKING = 10, 2.0  # tries between two neighbourhoods, and their seconds
_MOST_CUTS = 24
_GAP = 0.001  # of plans that only recompute, where they are but a beginning
_ASIDE = 0.25  # share of the time, beside it, for a budget that would do, where this one does not
_CLASSICS = 0.01  # share of the time for plans of Chen and Revolve: any plan, for the beginning
_BEGINNING = 0.25  # share of the time to make keep-all fit: solutions of relaxations are nearer


def _smaller(search: Search, seconds: float) -> None:
    """Where there is no plan: looks for the smallest budget for which there would be one."""
    problem, until = search.problem, search.seconds + seconds
    if search.best is not None or search.smallest is None:
        return
    everything = timeline(problem, range(len(problem)))
    low = max(search.budget, problem.floor - 1)
    while search.smallest - low > 0.01 * search.smallest and search.seconds < until:
        middle = (low + search.smallest) // 2
        line = Fitter(problem, middle, lambda: until - search.seconds).fit(everything)
        if line is None:
            low = middle
        else:  # not its peak: whoever plans for that one might not find the same
            search.smallest = middle


@final
@dataclass(frozen=True)
class Cuts:
    """The cut relaxation, which constrains memory at a few chosen moments. The default planner.

    Args:
        time_limit: Seconds after which the best plan so far is returned.
        gap: Stop when cost and bound are this close, as a share of the cost.
        seed: The seed of the local search.
        warm_start: Sequences of nodes to begin with, such as a run of DTR.
        swap: Values may also be swapped, at this bandwidth.
        known: Schedules to begin with when values may be swapped. The plan is never slower.
    """

    time_limit: float = 60.0
    gap: float = 0.0
    seed: int = 0
    warm_start: tuple[tuple[int, ...], ...] = ()
    swap: Swap | None = None
    known: tuple[Schedule, ...] = ()

    @property
    def name(self) -> str:
        return "cuts"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch, self.time_limit, self.swap)
        if self.swap is not None:
            return self._mix(search)
        known = revolve.optimum(problem, budget)
        if known is not None:
            search.offer(known, "chain")
            if search.best is not None:
                search.raise_bound(search.best.cost, "chain")
                return search.conclude(detail="a homogeneous chain: solved by its recurrence")
        search.offer(range(len(problem)), "keep all")
        if search.solved:
            return search.conclude()
        if search.impossible:
            return self._give_up(search)
        for steps in self.warm_start:
            search.offer(steps, "warm start")
        rounds = _Rounds(self, search)
        rounds.begin()
        for steps in chain(chen.sequences(problem), revolve.sequences(problem)):
            search.offer(steps, "classic")
            if search.seconds > self.time_limit * _CLASSICS and search.best is not None:
                break
        cuts = rounds.run()
        detail = f"{cuts} cut{'s' * (cuts != 1)}"
        return search.conclude(detail=detail) if search.best else self._give_up(search, detail)

    def _give_up(self, search: Search, detail: str = "") -> Plan:
        search.offer(recompute_all(search.problem), "recompute all")
        _smaller(search, self.time_limit * _ASIDE)
        return search.conclude(detail=detail)

    def _mix(self, search: Search) -> Plan:
        """With a host: the best mixture of recomputing and swapping."""
        problem = search.problem

        def alone(budget: Bytes, seconds: float) -> tuple[int, ...] | None:
            """A sequence without copies that fits `budget`."""
            planner = replace(self, time_limit=seconds, gap=max(self.gap, _GAP), swap=None)
            plan = planner.plan(problem, budget)
            return None if plan.schedule is None else steps_of(problem, plan.schedule)

        Mixer(search, alone, self.gap, self.seed).run(self.known, self.warm_start)
        return search.conclude()


class _Rounds:
    """The state of one search: the cuts so far and the rows for recomputations."""

    def __init__(self, planner: Cuts, search: Search) -> None:
        self.planner = planner
        self.search = search
        self.problem = search.problem
        memory = timeline(self.problem, range(len(self.problem))).memory
        self.cuts = [int(memory.argmax())]
        self.tight: set[tuple[int, int]] = set()
        self.rng = random.Random(planner.seed)
        self.until = float("inf")  # when looking for better plans has to end, to prove some more
        self.fitter = Fitter(self.problem, search.budget, self._left)
        self.repairer = Repairer(self.problem, self.fitter)

    def begin(self) -> None:
        """Keep-all, made to fit; where that fails, into a little less, for chance is in it."""
        everything = timeline(self.problem, range(len(self.problem)))
        self.until = self.search.seconds + _BEGINNING * self.planner.time_limit
        for margin in _MARGINS:
            budget = int(self.search.budget * margin)
            line = Fitter(self.problem, budget, self._left).fit(everything)
            if line is not None:
                self.search.offer(line.steps, "made to fit")
                break
        self.until = float("inf")

    def fit(self, line: Timeline) -> None:
        """Offers the plan that `line` becomes when it is made to fit."""
        best = self.search.best
        plan = self.fitter.fit(line, best.cost if best else float("inf"))
        if plan is not None:
            self.search.offer(plan.steps, "made to fit")

    def run(self) -> int:
        search = self.search
        turn = self.planner.time_limit / 120  # doubled each time: a quick proof is not held up
        while search.left > 0 and not self._close_enough():
            began = search.seconds
            line = self._exact()
            if line is None or self._close_enough():
                break
            if len(self.cuts) == 1:
                self._lean()
            self._neighbours(max(turn, 0.6 * (search.seconds - began)))
            turn = min(2 * turn, self.planner.time_limit / 12)
            if len(self.cuts) >= _MOST_CUTS or not self._add_cuts(line):
                break
        self._neighbours(search.left)
        return len(self.cuts)

    def _close_enough(self) -> bool:
        best = self.search.best
        return best is not None and best.cost - self.search.bound <= self.planner.gap * best.cost

    def _exact(self) -> Timeline | None:
        """The relaxation solved to the end; None when time is over before it has a solution.

        The solver's time is heavy-tailed in its random seed (one program: 0.03 s with three seeds,
        30 s with the fourth). So it is started again with another seed and twice the time.
        """
        search, problem = self.search, self.problem
        note = f"{len(self.cuts)} cut{'s' * (len(self.cuts) != 1)}"
        relaxation = Relaxation(problem, self.cuts, search.budget, self.tight)
        start = relaxation.start(search.best) if search.best is not None else None
        best: Timeline | None = None
        seed, seconds = 0, 2.0
        while search.left > 0 and not self._close_enough():
            solution = relaxation.model.solve(
                time_limit=min(search.left, seconds),
                absolute_gap=0.999,  # costs are multiples of the grain: that is the optimum
                start=start,
                seed=seed,
                watch=lambda _, bound: self._raise_bound(bound, note),
                enough=self._close_enough,  # a plan may have met the bound that rises here
            )
            self._raise_bound(solution.bound, note)
            if solution.values is not None:
                start = solution.values
                best = search.offer(decode(problem, relaxation.decisions(start)), note)
                self.fit(best)
                if solution.objective - solution.bound < 1:
                    return best
            seed, seconds = seed + 1, seconds * 2
            if seconds > 16:
                return best
        return best

    def _raise_bound(self, bound: float, note: str) -> None:
        self.search.raise_bound(self.problem.compute_ns + bound * self.problem.grain, note)

    def _left(self) -> float:
        return min(self.search.left, max(0.0, self.until - self.search.seconds))

    def _lean(self) -> None:
        """Plans from one cut. Smaller budgets, which make room for repairs, until there is one.

        The time that one takes is heavy-tailed in its price, so all get a little, then more.
        """
        search, limit = self.search, self.planner.time_limit
        end = search.seconds + limit / 6
        for turn in (limit / 60, limit / 20):
            for margin in _MARGINS:
                for price in _PRICES:
                    self.until = min(search.seconds + turn, end)
                    if self._left() <= 0 or self._close_enough():
                        return
                    line = self.repairer.lean(self.cuts, price, margin)
                    if line is not None:
                        search.offer(line.steps, f"leaning {price}")
                best = search.best
                if best is not None and best.cost < 1.05 * search.bound:
                    return

    def _neighbours(self, seconds: float) -> None:
        """Looks for better plans near the best one for about that long."""
        search = self.search
        self.until = search.seconds + seconds
        while search.best is not None and self._left() > 0 and not self._close_enough():
            self._shake(search.best)
            if self._left() <= 0:
                return
            line = self.repairer.neighbour(search.best, self.rng, self.rng.choice(_SHARES))
            if line is not None:
                search.offer(line.steps, "neighbour")

    def _shake(self, best: Timeline) -> None:
        """As long as a neighbour takes, if it takes its time."""
        until = self.search.seconds + _SHAKING
        for _ in range(_SHAKES):
            line = self.fitter.shake(best, self.rng)
            if line is not None:
                self.search.offer(line.steps, "shaken")
                best = line
            if self.search.seconds > until or self._left() <= 0:
                return

    def _add_cuts(self, line: Timeline) -> bool:
        """The worst moments become cuts; whether there was anything to add."""
        rows = len(self.tight)
        added = worst_moments(
            line,
            self.cuts,
            self.search.budget,
            self.tight,
            wanted=2 if len(self.cuts) < 12 else 1,
            apart=max(2, len(self.problem) // 100),
        )
        self.cuts = sorted({*self.cuts, *added})
        return bool(added) or len(self.tight) > rows
