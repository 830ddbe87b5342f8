"""The planner that scales, and the default: the cut relaxation, solved again with more cuts.

A round solves the relaxation (`_relaxation.py`) with memory constrained at K moments. Its bound
holds for every schedule. Its solution is decoded into a sequence, always a valid one; if the
sequence fits the budget, it is a plan, and if its cost meets the bound, it is optimal. If it does
not fit, the worst moments become cuts, and the next round begins. K starts at one, the peak of
keep-all, and ends between 1 and about 15: that is why programs of thousands of operators are
planned in seconds, where a program with all moments (Checkmate) takes hours.

Plans on the way there come from the same relaxation, which has many solutions of nearly the same
cost that differ in when their memory is needed:

- *leaning*: a small price on keeping what is needed late. The peaks after a cut come from what is
  still kept then together with what is recomputed there; what is needed last is best let go,
  since its recomputation meets an empty memory. A handful of prices are tried.
- *shrinking*: a budget smaller by the overshoot of the last try.
- *filling* and *annealing* (`_improve.py`): use the memory that a plan leaves unused.

Two programs of known optimum do not need all that: keep-all where it fits, and the homogeneous
chain (`revolve.py`), on which the relaxation is at its weakest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes
from rekindle.planners import revolve
from rekindle.planners._base import Search, Watch, recompute_all
from rekindle.planners._improve import anneal, fill
from rekindle.planners._problem import Problem
from rekindle.planners._relaxation import Relaxation, decode
from rekindle.planners._result import Plan
from rekindle.planners._sequence import Timeline, timeline

# Prices of memory that is kept for long, as a share of the program's cost for the whole budget
# kept to the end. From "decides ties" to "rules the choice".
_LEANINGS = (0.003, 0.01, 0.02, 0.05, 0.15)
_MOST_CUTS = 24


@final
@dataclass(frozen=True)
class Cuts:
    """The cut relaxation with adaptive cuts.

    time_limit: seconds after which the best plan so far is returned.
    gap: stop when cost and bound are that close, as a share of the cost; 0 wants the proof.
    seed: of the annealing; the same seed gives the same moves (not the same time for them).
    warm_start: sequences of nodes to begin with, such as a run of DTR (`steps_of`).
    """

    time_limit: float = 60.0
    gap: float = 0.0
    seed: int = 0
    warm_start: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        return "cuts"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch, self.time_limit)
        known = revolve.optimum(problem, budget)
        if known is not None:
            search.offer(known, "chain")
            if search.best is not None:
                search.raise_bound(search.best.cost, "chain")
                return search.conclude(detail="a homogeneous chain: solved by its recurrence")
        search.offer(range(len(problem)), "keep all")
        if search.solved or search.impossible:
            search.offer(recompute_all(problem))
            return search.conclude()
        for steps in self.warm_start:
            search.offer(steps, "warm start")
        cuts = _Rounds(self, search).run()
        return search.conclude(detail=f"{cuts} cut{'s' * (cuts != 1)}")


class _Rounds:
    """The state of one search: the cuts so far and the rows for recomputations."""

    def __init__(self, planner: Cuts, search: Search) -> None:
        self.planner = planner
        self.search = search
        self.problem = search.problem
        memory = timeline(self.problem, range(len(self.problem))).memory
        self.cuts = [int(memory.argmax())]
        self.tight: set[tuple[int, int]] = set()
        self.tried: set[tuple[int, ...]] = set()

    def run(self) -> int:
        search = self.search
        number = 0
        while search.left > 0 and not self._close_enough():
            line = self._exact(number)
            if line is None:
                break
            if line.peak <= search.budget:
                continue  # a plan within the tolerance: the next round has a smaller one
            if not self._close_enough():
                self._leaning(number)
                self._improve(number)
            if len(self.cuts) >= _MOST_CUTS or not self._add_cuts(line):
                break
            number += 1
        if search.left > 0 and not self._close_enough():
            self._improve(number, long=True)
        return len(self.cuts)

    def _close_enough(self) -> bool:
        best = self.search.best
        return best is not None and best.cost - self.search.bound <= self.planner.gap * best.cost

    def _exact(self, number: int) -> Timeline | None:
        """One round of the relaxation; None when nothing more can come of it."""
        search, problem = self.search, self.problem
        relaxation = Relaxation(problem, self.cuts, search.budget, self.tight)
        base = problem.compute_ns
        best = search.best
        # Costs are multiples of the grain: within less than one grain the optimum is reached.
        tolerance = 0.999
        solution = relaxation.model.solve(
            time_limit=search.left,
            absolute_gap=tolerance,
            start=relaxation.start(best) if best is not None else None,
            watch=lambda _, bound: search.raise_bound(
                base + bound * problem.grain, f"{len(self.cuts)} cuts"
            ),
        )
        search.raise_bound(base + solution.bound * problem.grain, f"{len(self.cuts)} cuts")
        if solution.values is None:
            return None
        return search.offer(decode(problem, relaxation.decisions(solution.values)), "relaxation")

    def _leaning(self, number: int) -> None:
        """Tries for a plan from solutions that keep little for late."""
        search = self.search
        budget = search.budget
        for price in _LEANINGS:
            if search.left <= 0 or self._close_enough():
                return
            relaxation = Relaxation(self.problem, self.cuts, budget, ())
            relaxation.lean(price)
            limit = min(search.left, 1.0 + self.planner.time_limit / 30)
            solution = relaxation.model.solve(time_limit=limit, relative_gap=0.003)
            if solution.values is None:
                continue
            line = search.offer(
                decode(self.problem, relaxation.decisions(solution.values)), f"leaning {price}"
            )
            if line.peak <= search.budget:
                search.offer(fill(line, search.budget), "filling")
            else:
                budget = max(
                    self.problem.floor, int(search.budget * search.budget / line.peak * 0.9995)
                )

    def _improve(self, number: int, *, long: bool = False) -> None:
        search = self.search
        if search.best is None:
            return
        seconds = search.left if long else min(search.left, self.planner.time_limit / 20)
        steps = anneal(
            search.best, search.budget, seconds=seconds, seed=self.planner.seed + number,
            target=search.bound,
        )
        search.offer(steps, "annealing")

    def _add_cuts(self, line: Timeline) -> bool:
        """The worst moments become cuts, spread out; whether there was anything to add."""
        budget = self.search.budget
        wanted = 2 if len(self.cuts) < 12 else 1
        apart = max(2, len(self.problem) // 100)
        added: list[int] = []
        rows = 0
        for step in (-line.memory).argsort(kind="stable"):
            if line.memory[step] <= budget or len(added) >= wanted:
                break
            node = line.steps[step]
            moment = min(int(line.first.searchsorted(step)), len(self.problem) - 1)
            if node != moment and (node, moment) not in self.tight and rows < 4:
                self.tight.add((node, moment))
                rows += 1
            for cut in (moment, moment - 1):
                if cut > 0 and all(abs(cut - other) >= apart for other in added):
                    if cut not in self.cuts and cut not in added:
                        added.append(cut)
                        break
        self.cuts = sorted({*self.cuts, *added})
        return bool(added) or rows > 0
