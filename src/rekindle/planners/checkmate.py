"""Plan by Checkmate: the optimal schedule by integer programming (Jain et al., MLSys 2020).

Nodes are operators, items are storages (`_problem.py`). The first computation of node t ends stage
t (frontier-advancing stages, their section 4.6):

    R[t,n]       node n is computed in stage t; R[t,t] = 1, and R[t,n] = 0 for n > t
    S[t,i]       item i stays in memory from stage t-1 to stage t
    FREE[t,i,n]  item i is freed right after node n in stage t
    U[t,n]       memory while node n is computed in stage t

    min sum c_n R[t,n]                                                            subject to
    R[t,n] <= R[t,maker(i)] + S[t,i]       for i that n reads                               (1b)
    S[t,i] <= R[t-1,maker(i)] + S[t-1,i]                                                    (1c)
    U[t,0]   = sum_i m_i S[t,i] + made(0) R[t,0]                                            (2)
    U[t,n+1] = U[t,n] - sum m_i FREE[t,i,n] + made(n+1) R[t,n+1]  <= budget                 (3)
    FREE[t,i,n] = R[t,n] and not S[t+1,i] and no later reader of i in stage t               (5)

(5) is made linear with hazards: 1 - R[t,n], S[t+1,i], and R of each later reader. FREE can be 1
only where no hazard is 1. An item may be freed after a node that reads it, or after the node that
makes it. A node may make several items (in the paper: one). If a node runs while its result is
still resident, both copies count until the next free, as in the verifier.

A stage computes a node at most once, in the program's order. The optimum and the bound hold for
such schedules only. The program has O(n^2) columns and O(n E) rows, so it suits small problems.

**Rounding** (section 5) has two phases. First solve the linear relaxation with (1 - epsilon) times
the budget and round S at a threshold. Then compute the fewest R with which every node can read its
inputs. Several epsilons and thresholds are tried. The lower bound is that of the relaxation with
the whole budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import final

import numpy as np

from rekindle._types import Bytes
from rekindle.planners._base import Search, Watch, recompute_all
from rekindle.planners._milp import Floats, Model
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan, Status


@final
@dataclass(frozen=True)
class Checkmate:
    """Planner that solves Checkmate's integer program to optimality, or until the time limit.

    Args:
        time_limit: Seconds after which the best plan so far is returned.
        most_columns: Programs with more columns are refused. The default suffices for about 70
            nodes.
    """

    time_limit: float = 60.0
    most_columns: int = 40_000

    @property
    def name(self) -> str:
        return "checkmate"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch, self.time_limit)
        search.offer(range(len(problem)), "keep all")
        if search.solved or search.impossible:
            search.offer(recompute_all(problem))
            return search.conclude()
        refusal = _refusal(problem, self.most_columns)
        if refusal:
            search.best = None
            return search.conclude(detail=refusal, status=Status.UNSUITED)
        stages = Stages(problem, budget)
        solution = stages.model.solve(
            time_limit=search.left,
            absolute_gap=0.999,  # costs are whole numbers here: a smaller gap means optimal
            watch=lambda _, bound: search.raise_bound(bound * problem.grain),
            enough=lambda: search.solved,
        )
        if solution.infeasible:
            least = self._smallest(problem, search)
            return search.conclude(status=Status.INFEASIBLE, detail=least)
        search.raise_bound(solution.bound * problem.grain)
        if solution.values is not None:
            search.offer(stages.sequence(solution.values), "integer program")
        return search.conclude(detail="of schedules that run a node at most once a stage, in order")

    def _smallest(self, problem: Problem, search: Search) -> str:
        """Minimise the peak instead of the cost, to find a budget that suffices.

        Returns:
            A note for the plan if the peak found is proven minimal, else an empty text.
        """
        stages = Stages(problem, None)
        solution = stages.model.solve(time_limit=search.left)
        if solution.values is None:
            return ""
        search.offer(stages.sequence(solution.values))
        return "that is the least of all schedules" if solution.bound >= solution.objective else ""


@final
@dataclass(frozen=True)
class Rounding:
    """Checkmate's linear relaxation with two-phase rounding: fast, and often above the budget.

    Args:
        time_limit: Seconds after which the best plan so far is returned.
        epsilons: Shares of the budget that the relaxation leaves free.
        thresholds: Values from which a fractional S counts as 1.
        most_columns: Programs with more columns are refused.
    """

    time_limit: float = 60.0
    epsilons: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.3)
    thresholds: tuple[float, ...] = (0.5, 0.3, 0.7)
    most_columns: int = 40_000

    @property
    def name(self) -> str:
        return "checkmate-rounding"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch, self.time_limit)
        refusal = _refusal(problem, self.most_columns)
        if refusal:
            return search.conclude(detail=refusal, status=Status.UNSUITED)
        for epsilon in self.epsilons:
            if search.left <= 0 or search.impossible:
                break
            stages = Stages(problem, int(budget * (1 - epsilon)))
            solution = stages.model.solve(time_limit=search.left, relaxed=True)
            if epsilon == 0:
                search.raise_bound(solution.bound * problem.grain)
            if solution.values is None:
                continue
            for threshold in self.thresholds:
                kept = _above(stages.stays(solution.values), threshold)
                search.offer(two_phase(problem, kept), f"epsilon {epsilon}")
        return search.conclude()


def _refusal(problem: Problem, most_columns: int) -> str:
    """Return why the integer program cannot describe the problem, or an empty text."""
    if problem.holds or any(problem.overwrites):
        return "Checkmate's model cannot express user-held values or in-place writes"
    nodes, items = len(problem), len(problem.nbytes)
    reads = sum(map(len, problem.reads))
    columns = nodes * (2 * nodes + 2 * items + reads) // 2
    if columns > most_columns:
        return (
            f"the integer program would have about {columns} columns, wanted at most "
            f"{most_columns}; write Cuts() instead"
        )
    return ""


def _above(stays: Floats, threshold: float) -> Callable[[int, int], bool]:
    return lambda stage, item: bool(stays[stage, item] >= threshold - 1e-9)


def two_phase(problem: Problem, kept: Callable[[int, int], bool]) -> list[int]:
    """Compute the fewest recomputations if the kept storages are given (phase two, section 5).

    Args:
        problem: The operators and storages to plan, made from a trace.
        kept: A function of (stage, storage) that returns True if the storage stays in memory from
            the previous stage to this stage.

    Returns:
        The nodes in the order in which they run.
    """
    steps: list[int] = []
    available: set[int] = set()
    for stage in range(len(problem)):
        available = {item for item in available if kept(stage, item)}
        needed: set[int] = set()
        wanted = {*problem.reads[stage]}
        if stage + 1 < len(problem):
            wanted |= {
                item
                for item, maker in enumerate(problem.maker)
                if maker < stage and kept(stage + 1, item)
            }
        pending = [item for item in wanted if item not in available]
        while pending:
            node = problem.maker[pending.pop()]
            if node not in needed:
                needed.add(node)
                pending += [item for item in problem.reads[node] if item not in available]
        for node in (*sorted(needed), stage):
            steps.append(node)
            available.update(problem.makes[node])
    return steps


@final
class Stages:
    """Checkmate's integer program. It minimises the cost, or the peak if `budget` is None."""

    def __init__(self, problem: Problem, budget: Bytes | None) -> None:
        self.problem = problem
        self.model = Model()
        self._unit = gcd(*problem.nbytes) or 1
        nodes = range(len(problem))
        cost = [0.0 if budget is None else c / problem.grain for c in problem.cost]
        self.run = {
            (t, n): self.model.column(
                cost[n],
                lower=float(n == t),
                upper=float(n == t or problem.replayable[n]),
                integer=True,
            )
            for t in nodes
            for n in range(t + 1)
        }
        self.stay = {
            (t, i): self.model.column(integer=True)
            for t in nodes
            for i, maker in enumerate(problem.maker)
            if maker < t
        }
        self._reads()
        if budget is None:
            most = sum(problem.nbytes) / self._unit + 1
            self._cap = self.model.column(1.0, upper=float(most))
            self._room = float(most)
        else:
            self._cap = None
            self._room = float((budget - problem.fixed) // self._unit)
        for t in nodes:
            self._memory(t)

    def sequence(self, values: Floats) -> list[int]:
        return [n for (_, n), column in self.run.items() if values[column] > 0.5]

    def stays(self, values: Floats) -> Floats:
        found = np.zeros((len(self.problem), len(self.problem.nbytes)))
        for (t, i), column in self.stay.items():
            found[t, i] = values[column]
        return found

    def _reads(self) -> None:
        """Add the constraints (1b) and (1c): only storages in memory can be read or kept."""
        for (t, n), column in self.run.items():
            for i in self.problem.reads[n]:
                there = [self.run[t, self.problem.maker[i]]]
                if (t, i) in self.stay:
                    there.append(self.stay[t, i])
                self.model.row([column, *there], [-1.0] + [1.0] * len(there), lower=0.0)
        for (t, i), column in self.stay.items():
            there = [self.run[t - 1, self.problem.maker[i]]]
            if (t - 1, i) in self.stay:
                there.append(self.stay[t - 1, i])
            self.model.row([column, *there], [-1.0] + [1.0] * len(there), lower=0.0)

    def _memory(self, t: int) -> None:
        """Add the constraints (2) and (3) of stage t: memory at each node is within the budget."""
        problem = self.problem
        before: list[tuple[int, float]] = [
            (self.stay[t, i], nbytes / self._unit)
            for i, nbytes in enumerate(problem.nbytes)
            if nbytes and (t, i) in self.stay
        ]
        for n in range(t + 1):
            made = sum(problem.nbytes[i] for i in problem.makes[n]) / self._unit
            terms = [*before, (self.run[t, n], made)]
            used = self.model.column(upper=self._room)
            self.model.row(
                [used, *(column for column, _ in terms)],
                [-1.0, *(size for _, size in terms)],
                lower=0.0,
                upper=0.0,
            )
            if self._cap is not None:
                self.model.row([used, self._cap], [1.0, -1.0], upper=0.0)
            before = [(used, 1.0)]
            for i in {*problem.reads[n], *problem.makes[n]}:
                if problem.nbytes[i]:
                    before.append((self._free(t, i, n), -problem.nbytes[i] / self._unit))

    def _free(self, t: int, i: int, n: int) -> int:
        """Add the variable FREE[t,i,n] and its constraints (5); return its column."""
        later = [self.run[t, reader] for reader in self.problem.readers[i] if n < reader <= t]
        stay = [self.stay[t + 1, i]] if (t + 1, i) in self.stay else []
        free = self.model.column()
        self.model.row([free, self.run[t, n]], [1.0, -1.0], upper=0.0)
        for hazard in (*stay, *later):
            self.model.row([free, hazard], [1.0, 1.0], upper=1.0)
        return free
