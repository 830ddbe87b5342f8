"""Plan by the cut relaxation, solved repeatedly with more cuts: the default planner.

A round solves the relaxation (`_relaxation.py`), an integer program that constrains memory at K
moments only: the cuts. Its lower bound holds for every schedule. Its solution is decoded into a
sequence of nodes that can always be executed. If the sequence fits the budget, it is a plan; if its
cost also meets the bound, the plan is optimal. If the sequence does not fit, the moments with the
largest excess become cuts, and the next round begins. K starts at 1, the peak of the run without
evictions, and ends between 1 and about 15. So programs of thousands of operators are planned in
seconds, where an integer program with all moments (Checkmate) takes hours.

Further plans come from two modules. `_fitting.py` takes a sequence that does not fit, such as the
one without evictions, and evicts more until the sequence fits. `_repair.py` adds cuts to a solution
that does not fit, keeps the decisions at earlier cuts, and searches near the best plan. These plans
matter if the relaxation has many solutions of nearly the same cost, or if recomputations have
little room.

With swapping, `_swapping.py` starts from plans that only recompute, and the bound is that of the
relaxation with copies (`_swap_bound.py`).

Two kinds of problems have known optima and need no search: those that fit without evictions, and
homogeneous chains (`revolve.py`), for which the relaxation is weakest.
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

# Prices for `Relaxation.lean`: the price of keeping the whole budget to the end, as a share of the
# program's cost. The lowest price only decides ties; the highest one dominates the solution.
_PRICES = (0.003, 0.005, 0.01, 0.02, 0.03, 0.1, 0.3)
# shares of the budget to plan with; the rest of the budget is room for repairs
_MARGINS = (1.0, 0.98, 0.93)
_SHARES = (0.05, 0.1, 0.2, 0.4)  # shares of the items that `Repairer.neighbour` leaves open
_SHAKES, _SHAKING = 10, 2.0  # most calls of `Fitter.shake` in a row, and the seconds for them
_MOST_CUTS = 24
_GAP = 0.001  # gap at which a plan is good enough to start a search with swapping
_ASIDE = 0.25  # additional share of the time to find a larger budget, if the given one has no plan
_CLASSICS = 0.01  # share of the time for plans of Chen and Revolve, which are found quickly
_BEGINNING = 0.25  # share of the time to make the sequence without evictions fit the budget


def _smaller(search: Search, seconds: float) -> None:
    """If no plan fits the budget, search for the smallest budget with a plan, for `seconds`."""
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
        else:
            # The peak of `line` may be below `middle`. But the planner might find no plan if that
            # peak were its budget. So `middle` is the smallest budget that is known to work.
            search.smallest = middle


@final
@dataclass(frozen=True)
class Cuts:
    """Default planner: solves the cut relaxation, which constrains memory at few moments only.

    Args:
        time_limit: Seconds after which the best plan so far is returned.
        gap: Stop when cost and bound are this close, as a share of the cost.
        seed: The seed of the local search.
        warm_start: Sequences of nodes to begin with, such as a run of DTR.
        swap: Values may also be swapped, at this bandwidth.
        known: Schedules to begin with when values may be swapped. The plan is never slower than
            these.
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
        """Search for the best plan that recomputes some storages and swaps others."""
        problem = search.problem

        def alone(budget: Bytes, seconds: float) -> tuple[int, ...] | None:
            """Return a sequence that only recomputes and fits `budget`, or None."""
            planner = replace(self, time_limit=seconds, gap=max(self.gap, _GAP), swap=None)
            plan = planner.plan(problem, budget)
            return None if plan.schedule is None else steps_of(problem, plan.schedule)

        Mixer(search, alone, self.gap, self.seed).run(self.known, self.warm_start)
        return search.conclude()


class _Rounds:
    """Search for plans that only recompute, in rounds with more and more cuts.

    `cuts` are the nodes at whose first run memory is constrained. `tight` are the additional rows
    for memory during recomputations, as for `Relaxation`.
    """

    def __init__(self, planner: Cuts, search: Search) -> None:
        self.planner = planner
        self.search = search
        self.problem = search.problem
        memory = timeline(self.problem, range(len(self.problem))).memory
        self.cuts = [int(memory.argmax())]
        self.tight: set[tuple[int, int]] = set()
        self.rng = random.Random(planner.seed)
        # seconds since the start at which the current part of the search must end
        self.until = float("inf")
        self.fitter = Fitter(self.problem, search.budget, self._left)
        self.repairer = Repairer(self.problem, self.fitter)

    def begin(self) -> None:
        """Make the sequence without evictions fit the budget, and offer the result as a plan.

        If this fails, try slightly smaller budgets, for which the greedy search may succeed.
        """
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
        """Make `line` fit the budget by further evictions, and offer the result as a plan."""
        best = self.search.best
        plan = self.fitter.fit(line, best.cost if best else float("inf"))
        if plan is not None:
            self.search.offer(plan.steps, "made to fit")

    def run(self) -> int:
        """Run rounds until the plan is good enough or time is over; return the number of cuts."""
        search = self.search
        # seconds of local search in the next round; doubled after each round
        turn = self.planner.time_limit / 120
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
        """Solve the relaxation with the current cuts to optimality.

        With some random seeds the solver takes very long (one program: 0.03 s with three seeds, 30
        s with a fourth one). So after a short time the solver is restarted with another seed and
        twice the time.

        Returns:
            The sequence of the best solution, or None if the solver found none in time.
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
                absolute_gap=0.999,  # Costs are whole numbers here, so a gap below 1 means optimal.
                start=start,
                seed=seed,
                watch=lambda _, bound: self._raise_bound(bound, note),
                enough=self._close_enough,  # stop when the rising bound meets a known plan's cost
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
        """Make plans from the relaxation with one cut, and with a price on storages read late.

        Several prices and several shares of the budget are tried.

        With some prices the solver takes very long. So all attempts get a short time first, and a
        longer one afterwards.
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
        """Search for better plans near the best one, for about `seconds` (local search)."""
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
        """Remove random recomputations from the best plan and make it fit again, a few times."""
        until = self.search.seconds + _SHAKING
        for _ in range(_SHAKES):
            line = self.fitter.shake(best, self.rng)
            if line is not None:
                self.search.offer(line.steps, "shaken")
                best = line
            if self.search.seconds > until or self._left() <= 0:
                return

    def _add_cuts(self, line: Timeline) -> bool:
        """Add memory constraints at the steps where `line` exceeds the budget most.

        For each such step, `cuts` gets a node that runs for the first time at or near this step.
        If the step recomputes a node, `tight` gets a pair: the recomputed node, and the first node
        that runs for the first time after the step.

        Returns:
            True if anything was added.
        """
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
