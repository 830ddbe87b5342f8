"""Make plans from solutions of the cut relaxation (`_relaxation.py`) that exceed the budget.

The relaxation limits memory only at a few moments, the cuts. `cuts.py` calls this module.

*Repair*: take the solution with one cut, fix which items are resident at this cut, and add cuts
where the sequence of the solution exceeds the budget. Only the decisions at the new cuts are open,
so a round takes a fraction of a second. A dozen rounds end in a plan that costs a little more.

*Leaning*: solutions of nearly the same cost differ in when they need memory. A small price on items
that are read late decides between such solutions. An item that is kept until late in the backward
pass takes memory while other items are recomputed. An evicted item is recomputed late instead, when
less memory is in use.

*Neighborhoods* (Shaw 1998): take the best plan, fix most items at every cut, leave a few random
items open, solve, and repair. These integer programs are small too. A result is used only if it
costs less than the best plan.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import final

import numpy as np

from rekindle._types import Bytes
from rekindle.planners._fitting import Fitter
from rekindle.planners._milp import Floats
from rekindle.planners._problem import Problem
from rekindle.planners._relaxation import Relaxation, decode
from rekindle.planners._sequence import Timeline, prune, timeline

_MOST_ROUNDS = 25


@final
class Repairer:
    """Find plans for the budget of `fitter` by repairing solutions of the relaxation."""

    def __init__(self, problem: Problem, fitter: Fitter) -> None:
        self.problem = problem
        self.fitter = fitter
        self.budget = fitter.budget
        self.left = fitter.left

    def lean(self, cuts: list[int], price: float, margin: float) -> Timeline | None:
        """Make a plan from the relaxation with a price on storages that are read late.

        Args:
            cuts: The cuts: nodes at whose first run memory is constrained.
            price: The price, as for `Relaxation.lean`.
            margin: The share of the budget that the relaxation may use.

        Returns:
            A plan that fits the whole budget, or None if none is found.
        """
        budget = int(self.budget * margin)
        relaxation = Relaxation(self.problem, cuts, budget)
        relaxation.lean(price)
        solution = relaxation.model.solve(time_limit=min(5.0, self.left()), relative_gap=0.003)
        if solution.values is None:
            return None
        return self._repair(relaxation, solution.values, budget, price)

    def neighbour(self, best: Timeline, rng: random.Random, share: float) -> Timeline | None:
        """Search for a plan that differs from `best` in about the fraction `share` of the storages.

        Returns:
            A plan that costs less than `best`, or None.
        """
        cuts = self._busy(best, rng)
        relaxation = Relaxation(self.problem, cuts, self.budget)
        start = relaxation.start(best)
        # Items that are made one soon after another compete for memory. So half of the open items
        # are a range of consecutive items. The other half is chosen at random.
        items = len(self.problem.nbytes)
        width = max(1, int(items * share / 2))
        center = rng.randrange(items)
        free = {*range(center - width, center + width)}
        free |= {item for item in range(items) if rng.random() < share / 2}
        for cut in cuts:
            relaxation.fix(cut, residents(best, cut), free)
        relaxation.lean(rng.choice([0.0, 0.0, 0.001, 0.005]))
        solution = relaxation.model.solve(
            time_limit=min(3.0, self.left()), relative_gap=0.001, start=start
        )
        if solution.values is None:
            return None
        return self._repair(relaxation, solution.values, self.budget, 0.0, most=best.cost)

    def _busy(self, line: Timeline, rng: random.Random) -> list[int]:
        """Choose random cuts at steps of `line` that use much memory, not too close together."""
        apart = max(3, len(self.problem) // 60)
        wanted = rng.randint(4, 10)
        noise = np.array([rng.uniform(0.9, 1.0) for _ in line.steps])
        cuts: list[int] = []
        for step in (-line.memory * noise).argsort(kind="stable"):
            if len(cuts) >= wanted:
                break
            moment = moment_of(line, int(step))
            if all(abs(moment - cut) >= apart for cut in cuts):
                cuts.append(moment)
        return sorted(cuts)

    def _repair(
        self,
        relaxation: Relaxation,
        values: Floats,
        budget: Bytes,
        price: float,
        most: float = float("inf"),
    ) -> Timeline | None:
        """Add cuts to a relaxation, round by round, until the sequence of its solution fits.

        Returns:
            The plan with the lowest cost below `most` of all rounds, or None.
        """
        problem, tight = self.problem, set[tuple[int, int]]()
        plan: Timeline | None = None
        for _ in range(_MOST_ROUNDS):
            steps = decode(problem, relaxation.decisions(values))
            line = timeline(problem, prune(problem, steps))
            fitted = self.fitter.fit(line, most)
            if fitted is not None:
                plan, most = fitted, fitted.cost
            if line.peak <= self.budget or line.cost >= most or self.left() <= 0:
                break
            added = worst_moments(line, relaxation.cuts, budget, tight)
            if not added:
                break
            found = self._refine(line, relaxation.cuts, added, budget, price, tight)
            if found is None:
                break
            relaxation, values = found
        return plan

    def _refine(
        self,
        line: Timeline,
        before: tuple[int, ...],
        added: list[int],
        budget: Bytes,
        price: float,
        tight: set[tuple[int, int]],
    ) -> tuple[Relaxation, Floats] | None:
        """Solve the relaxation with the cuts `added`, and with the decisions at other cuts fixed.

        If this has no solution, it is tried again with free decisions at a few of the earlier cuts,
        those nearest to the new ones.

        Returns:
            The relaxation and its solution, or None if none of these attempts has a solution.
        """
        cuts = sorted({*before, *added})
        near = sorted(before, key=lambda cut: min(abs(cut - other) for other in added))
        for opened in (0, 2, 6):
            relaxation = Relaxation(self.problem, cuts, budget, tight)
            relaxation.lean(price)
            for cut in near[opened:]:
                relaxation.fix(cut, residents(line, cut))
            solution = relaxation.model.solve(time_limit=min(4.0, self.left()), relative_gap=0.003)
            if solution.values is not None:
                return relaxation, solution.values
        return None


def worst_moments(
    line: Timeline,
    cuts: Sequence[int],
    budget: Bytes,
    tight: set[tuple[int, int]],
    *,
    wanted: int = 2,
    apart: int = 3,
) -> list[int]:
    """Choose new cuts at the steps where a sequence exceeds the budget most.

    A cut is a node at whose first run the relaxation constrains memory.

    Args:
        line: The sequence of nodes, as a timeline.
        cuts: The existing cuts.
        budget: The budget (bytes).
        tight: Pairs (node, moment), as for `Relaxation`: memory is constrained while `node` is
            recomputed before the first run of node `moment`. Pairs for the worst steps are added.
        wanted: The most new cuts.
        apart: The least distance between new cuts, in nodes.
    """
    added: list[int] = []
    rows = 0
    order: list[int] = (-line.memory).argsort(kind="stable").tolist()
    for step in order:
        if line.memory[step] <= budget or len(added) >= wanted:
            break
        node, moment = line.steps[step], moment_of(line, step)
        if node != moment and (node, moment) not in tight and rows < 6:
            tight.add((node, moment))
            rows += 1
        for cut in (moment, moment - 1):
            far = all(abs(cut - other) >= apart for other in added)
            if cut > 0 and cut not in cuts and far:
                added.append(cut)
                break
    return added


def moment_of(line: Timeline, step: int) -> int:
    """Return the first node whose first run is at `step` or later."""
    return min(int(line.first.searchsorted(step)), len(line.problem) - 1)


def residents(line: Timeline, cut: int) -> set[int]:
    """Return the items (storages) that are in memory when node `cut` first runs."""
    step = int(np.asarray(line.first)[cut])
    return {copy.item for copy in line.copies if copy.start < step <= copy.end}
