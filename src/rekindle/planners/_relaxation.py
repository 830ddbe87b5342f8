"""Formulate the cut relaxation: an integer program with memory constrained at few moments only.

An exact program constrains memory at every moment. `cuts.py` solves the relaxation with a growing
number of moments, `_repair.py` finds plans with it, and `_swap_bound.py` uses it as a lower bound
with swapping. Nodes n are operators, items i are storages (`_problem.py`).

A *cut* is the moment at which a node t_k is computed for the first time. Interval k runs from cut k
to cut k+1, the last interval to the end of the program. With t_1 < ... < t_K:

    S[k,i] in {0,1}   item i, made before t_k, is resident at cut k
    R[k,n] in {0,1}   node n, first computed before t_k, is computed *again* in interval k

    min  sum_n c_n + sum_{k,n} c_n R[k,n]                          subject to
    (memory)    sum_i m_i S[k,i] + made(t_k) - lent(t_k) <= budget
    (at a cut)  S[k,i] = 1                              for i that t_k reads, and i on hold
    (carry)     S[k+1,i] <= S[k,i] + R[k,maker(i)]      for i made before t_k
    (first)     S[k,i] + R[k,maker(i)] >= 1             for i that a first run in interval k reads
    (again)     R[k,n] <= S[k,i] + R[k,maker(i)]        for i that n reads

An item that is first computed within an interval counts as available throughout the interval.
Every schedule with this order of first computations satisfies all rows (constraints): S are the
items in memory at the cuts, R the nodes recomputed between the cuts. So the optimum of the program,
and any lower bound of the optimum, is a **lower bound** for all such schedules. If S is integral,
an optimal R is integral as well: it is the smallest set of nodes that the rows allow. R is declared
integral nevertheless, because that makes the solver up to a hundred times faster.

With a bandwidth to and from a host, an item may be swapped in instead of recomputed:

    B[k,i] in {0,1}   the swap-in of item i, made before t_k, begins in interval k
    W[k,i] in [0,1]   the copy of item i, made before t_k, is complete on the host at cut k
    d[k] >= 0         delay of the start of t_k, compared with no recomputing and waiting; d[K+1]:
                      delay of the end of the program

    min  sum_n c_n + d[K+1]                                        subject to
    (clock)     d[k+1] >= d[k] + sum_n c_n R[k,n]
    (source)    B[k,i], W[k+1,i] <= W[k,i] + S[k,i] + R[k,maker(i)]
    (out)       sum_i out_i W[k,i] <= time(k) - after(j)           over i made from t_j on; j < k
    (in)        sum_i in_i sum_{l>=k} B[l,i] <= time(K+1) - after(k)
    (by then)   sum_i in_i sum_{j<=l<k} F[l,i] <= time(k) - after(j),
                F[l,i] >= B[l,i] - S[l,i] - R[l,maker(i)]          for i that first runs in interval
                                                                   l, or t_{l+1}, read

Here time(k) = d[k] + the cost of all nodes before t_k, after(k) = time(k) + the cost of t_k, and
after(0) is the cost of the first node. out_i and in_i are the times to copy item i to the host and
back. In the rows (carry), (first) and (again), R[k,maker(i)] becomes R[k,maker(i)] + B[k,i]. Memory
that a copy to the host still reads counts as S. So an item that is neither resident nor recomputed
has a complete copy on the host. Each direction carries one copy at a time. An item that is swapped
in and read in interval k is complete before the interval ends. Limits of the host's memory are left
out. Every run that recomputes and swaps satisfies these rows, if swap-ins that nothing reads are
left out of the run. So the optimum is a lower bound for all such runs.

We know of no publication of this relaxation. Checkmate (Jain et al., MLSys 2020) is the case of a
cut at every node, with more rows for the memory between first computations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import gcd
from typing import final

import numpy as np

from rekindle._types import Bytes
from rekindle.planners._milp import Floats, Model
from rekindle.planners._problem import Problem
from rekindle.planners._sequence import Timeline


@final
@dataclass(frozen=True)
class Decisions:
    """Decisions of a solution of the integer program, for each cut.

    A cut is a node (operator) at whose first run memory is constrained. `resident` are the items
    (storages) in memory at the cut. `again` are the nodes that are recomputed between this cut and
    the next one.
    """

    cuts: tuple[int, ...]
    resident: tuple[frozenset[int], ...]
    again: tuple[frozenset[int], ...]


@final
@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth to the host and back, in bytes per second."""

    out: int
    back: int


@final
class Relaxation:
    """Integer program for some cuts. Its objective is the time lost to recomputing and waiting.

    A cut is a node (operator) at whose first run memory is constrained.

    Args:
        problem: The operators and storages to plan, made from a trace.
        cuts: The nodes whose first computations are cuts.
        budget: The budget (bytes).
        tight: Pairs (node, moment). For each pair a row constrains memory while `node` is
            recomputed in the interval just before the first run of node `moment`.
        bandwidth: The bandwidth to the host, if values may be swapped.
    """

    def __init__(
        self,
        problem: Problem,
        cuts: Sequence[int],
        budget: Bytes,
        tight: Iterable[tuple[int, int]] = (),
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.problem = problem
        self.bandwidth = bandwidth
        self.cuts = tuple(sorted(cuts))
        self.budget = budget
        self.model = Model()
        self._resident: list[dict[int, int]] = []  # for each cut: item -> column of S (is resident)
        self._again: list[dict[int, int]] = []  # for each cut: node -> column of R (is recomputed)
        self._back: list[dict[int, int]] = []  # for each cut: item -> column of B (is swapped in)
        # for each cut: item -> column of W (the host has a whole copy)
        self._whole: list[dict[int, int]] = []
        self._unit = gcd(*problem.nbytes) or 1
        self.tick: float = problem.grain if bandwidth is None else problem.compute_ns / 1000 or 1.0
        """Nanoseconds for which a value of 1 in the objective stands."""
        last = _last_use(problem)
        for k in range(len(self.cuts)):
            self._columns(k, last)
        if bandwidth is not None:
            self._backs()
            self._clock(bandwidth)
        for k in range(len(self.cuts)):
            self._memory(k, budget)
            self._recomputation(k)
            self._first_computations(k)
            if k:
                self._carry(k)
        self._kept: dict[tuple[int, int], int] = {}
        for node, k in sorted({(node, self._interval(before)) for node, before in tight}):
            self._while_again(k, node, budget)

    def decisions(self, values: Floats) -> Decisions:
        """Convert a solution of the integer program to decisions for each cut."""
        resident = (
            frozenset(item for item, column in columns.items() if values[column] > 0.5)
            for columns in self._resident
        )
        again = (
            frozenset(node for node, column in columns.items() if values[column] > 1e-4)
            for columns in self._again
        )
        return Decisions(self.cuts, tuple(resident), tuple(again))

    def start(self, line: Timeline) -> Floats:
        """Convert a sequence of nodes to the solution of the integer program that describes it."""
        values = np.zeros(self.model.columns)
        at = line.first[list(self.cuts)]
        for copy in line.copies:
            # `copy` is a period in which an item is in memory, from a first to a last step. A cut
            # is a step at which the program limits the memory. If the period ends at that step, the
            # item counts there; if it begins there, it does not.
            low = int(np.searchsorted(at, copy.start, side="right"))
            high = int(np.searchsorted(at, copy.end, side="right"))
            for k in range(low, high):
                column = self._resident[k].get(copy.item)
                if column is not None:
                    values[column] = 1.0
        for step, node in enumerate(line.steps):
            if step != line.first[node]:
                k = int(np.searchsorted(at, step, side="right")) - 1
                if k >= 0 and node in self._again[k]:
                    values[self._again[k][node]] = 1.0
        return values

    def lean(self, price: float) -> None:
        """Add a price to the objective for keeping storages that are read only long after a cut.

        With this price the optimum is no longer a lower bound.

        Args:
            price: The price of keeping the whole budget from the first cut to the end, as a
                multiple of the cost of the program.
        """
        problem = self.problem
        # The budget may be 0 bytes, because callers pass a share of the user's budget.
        scale = price * problem.compute_ns / self.tick / max(1, self.budget) / len(self.cuts)
        for cut, columns in zip(self.cuts, self._resident, strict=True):
            for item, column in columns.items():
                if problem.readers[item]:
                    share = (problem.readers[item][-1] - cut) / max(1, len(problem) - cut)
                    self.model.price(column, scale * problem.nbytes[item] * share)

    def fix(self, cut: int, items: Set[int], free: Set[int] = frozenset()) -> None:
        """Fix which items (storages) are in memory at a cut.

        Args:
            cut: The node whose first run is the cut.
            items: The resident items. Items that the rows force to be resident are added.
            free: Items for which the solver may still decide.
        """
        k = self.cuts.index(cut)
        forced = self._forced(cut)
        for item, column in self._resident[k].items():
            if item not in free:
                self.model.fix(column, float(item in items or item in forced))

    def _forced(self, cut: int) -> set[int]:
        held = {h.item for h in self.problem.holds if h.first < cut <= h.last}
        return held.union(self.problem.reads[cut])

    def _columns(self, k: int, last: Sequence[int]) -> None:
        """Add the variables S (is resident) and R (is recomputed) of cut k."""
        problem, cut = self.problem, self.cuts[k]
        forced = self._forced(cut)
        self._resident.append(
            {
                item: self.model.column(lower=float(item in forced), integer=True)
                for item, maker in enumerate(problem.maker)
                if maker < cut and (last[item] >= cut or item in forced)
            }
        )
        self._again.append(
            {
                node: self.model.column(self._price(node), integer=True)
                for node in range(cut)
                if problem.replayable[node]
                and any(last[item] >= cut for item in problem.makes[node])
            }
        )

    def _price(self, node: int) -> float:
        """Return the coefficient in the objective for recomputing `node`.

        With swapping the coefficient is 0, because the constraints that `_clock` adds contain the
        cost of the node.
        """
        return 0.0 if self.bandwidth else self.problem.cost[node] / self.tick

    def _backs(self) -> None:
        """Add variables and constraints for swap-ins (B), and for copies on the host (W)."""
        model = self.model
        for columns in self._resident:
            self._back.append({item: model.column(integer=True) for item in columns})
            self._whole.append({item: model.column() for item in columns})
        for k, back in enumerate(self._back):
            for item, column in back.items():
                sources = [self._whole[k][item], *self._made(k, item)]
                model.row([column, *sources], [-1.0] + [1.0] * len(sources), lower=0.0)
                if k and item in self._back[k - 1]:
                    sources = [self._whole[k - 1][item], *self._made(k - 1, item)]
                    whole = self._whole[k][item]
                    model.row([whole, *sources], [-1.0] + [1.0] * len(sources), lower=0.0)

    def _clock(self, bandwidth: Bandwidth) -> None:
        """Add a variable (column) for the delay of each cut, and constraints (rows) for copies.

        A cut is the moment at which an operator (node) first runs. The delay of a cut is how much
        later that run starts than it would without recomputing and waiting. The constraints say
        that copies to and from the host take time.
        """
        problem, model, cuts = self.problem, self.model, self.cuts
        before = np.concatenate(([0.0], np.cumsum(problem.cost))) / self.tick
        begin = [float(before[cut]) for cut in (*cuts, len(problem))]
        # for each cut, the time at which the first run of its operator ends
        after = [float(before[cut + 1]) for cut in cuts]
        end = len(cuts)
        late = [model.column(upper=np.inf) for _ in cuts] + [model.column(1.0, upper=np.inf)]
        out, back = (1e9 / rate / self.tick for rate in (bandwidth.out, bandwidth.back))
        fetched = [self._fetched(k) for k in range(end)]

        def takes(lengths: list[tuple[int, float]], since: int, until: int) -> None:
            """Add the constraint that all copies in `lengths` fit between two cuts.

            The time for the copies begins when the operator of cut `since` ends, or the program's
            first operator if `since` is -1. It ends at cut `until`.
            """
            if not lengths:
                return
            columns = [late[until], *(column for column, _ in lengths)]
            values = [1.0, *(-length for _, length in lengths)]
            start = before[1]
            if since >= 0:
                columns, values, start = [*columns, late[since]], [*values, -1.0], after[since]
            model.row(columns, values, lower=start - begin[until])

        for k in range(end):
            again = [(c, problem.cost[node] / self.tick) for node, c in self._again[k].items()]
            columns = [late[k + 1], late[k], *(column for column, _ in again)]
            model.row(columns, [1.0, -1.0, *(-length for _, length in again)], lower=0.0)
            for j in range(-1, k):
                first = cuts[j] if j >= 0 else 0
                takes(self._lengths([self._whole[k]], out, first), j, k)
            takes(self._lengths(self._back[k:], back), k, end)
            for until in range(k + 1, end):
                takes(self._lengths(fetched[k:until], back), k, until)

    def _lengths(
        self, columns: Sequence[Mapping[int, int]], tick: float, first: int = 0
    ) -> list[tuple[int, float]]:
        """Return (column, time of a copy) for the storages made by node `first` or later."""
        problem = self.problem
        return [
            (column, problem.nbytes[item] * tick)
            for each in columns
            for item, column in each.items()
            if problem.maker[item] >= first and problem.nbytes[item]
        ]

    def _fetched(self, k: int) -> dict[int, int]:
        """Add the variable F[k,i] for each storage i that is read before interval k ends.

        Interval k is the time from cut k to cut k+1. F[k,i] must be 1 if storage i is available in
        this interval only because it is swapped in.

        Returns:
            For each storage the number of its variable (column) F[k,i].
        """
        needed = set(self._needed(k))
        if k + 1 < len(self.cuts):
            needed.update(self.problem.reads[self.cuts[k + 1]])
        found: dict[int, int] = {}
        for item in sorted(needed):
            if item in self._back[k]:
                others = self._made(k, item)
                found[item] = self.model.column()
                columns = [found[item], self._back[k][item], *others]
                self.model.row(columns, [1.0, -1.0] + [1.0] * len(others), lower=0.0)
        return found

    def _memory(self, k: int, budget: Bytes) -> None:
        """Add the constraint that the storages in memory at cut k fit into the budget.

        Cut k is the moment at which its operator (node) first runs.
        """
        problem, cut = self.problem, self.cuts[k]
        room = budget - problem.fixed - sum(problem.nbytes[item] for item in problem.makes[cut])
        room += sum(problem.nbytes[item] for item in problem.overwrites[cut])
        items = [item for item in self._resident[k] if problem.nbytes[item]]
        self.model.row(
            [self._resident[k][item] for item in items],
            [problem.nbytes[item] / self._unit for item in items],
            upper=room // self._unit,
        )

    def _available(self, k: int, item: int) -> list[int]:
        """Return the variables of which one must be 1 if `item` is available in interval k.

        Variables are given by their column. Interval k is the time from cut k to cut k+1.
        """
        columns = self._made(k, item)
        if self._back and item in self._back[k]:
            columns.append(self._back[k][item])
        return columns

    def _made(self, k: int, item: int) -> list[int]:
        """Return the variables S and R that make `item` available in interval k, without swap-in.

        S: the item is resident at cut k. R: its maker is recomputed in the interval.
        """
        maker = self.problem.maker[item]
        columns = [self._resident[k][item]] if item in self._resident[k] else []
        if maker in self._again[k]:
            columns.append(self._again[k][maker])
        return columns

    def _recomputation(self, k: int) -> None:
        """Add the constraints (again) of interval k: recomputed operators need their inputs."""
        for node, column in self._again[k].items():
            for item in self.problem.reads[node]:
                there = self._available(k, item)
                self.model.row([column, *there], [-1.0] + [1.0] * len(there), lower=0.0)

    def _needed(self, k: int) -> list[int]:
        """Return the storages from before cut k that first runs of operators in interval k read."""
        cut = self.cuts[k]
        end = self.cuts[k + 1] if k + 1 < len(self.cuts) else len(self.problem)
        reads = {item for node in range(cut + 1, end) for item in self.problem.reads[node]}
        return sorted(item for item in reads if self.problem.maker[item] < cut)

    def _first_computations(self, k: int) -> None:
        """Add the constraints (first) of interval k: first runs of operators need their inputs."""
        for item in self._needed(k):
            there = self._available(k, item)
            self.model.row(there, [1.0] * len(there), lower=1.0)

    def _carry(self, k: int) -> None:
        """Add the constraints (carry) for cut k.

        A storage that is resident at cut k was resident at the cut before, or was recomputed or
        swapped in between the two cuts.
        """
        for item, column in self._resident[k].items():
            if self.problem.maker[item] < self.cuts[k - 1]:
                there = self._available(k - 1, item)
                self.model.row([column, *there], [-1.0] + [1.0] * len(there), lower=0.0)

    def _interval(self, before: int) -> int:
        """Return the interval that contains, or ends with, the first run of node `before`."""
        return int(np.searchsorted(self.cuts, before, side="left")) - 1

    def _while_again(self, k: int, node: int, budget: Bytes) -> None:
        """Add a constraint on memory while `node` is recomputed in interval k (cut k to k+1)."""
        if not 0 <= k < len(self.cuts) - 1 or node not in self._again[k]:
            return
        problem = self.problem
        own = {*problem.reads[node], *problem.makes[node]}
        kept = [
            item
            for item in self._resident[k + 1]
            if item not in own and problem.maker[item] < self.cuts[k] and problem.nbytes[item]
        ]
        need = sum(problem.nbytes[item] for item in own)
        self.model.row(
            [self._again[k][node], *(self._keep(k, item) for item in kept)],
            [need / self._unit, *(problem.nbytes[item] / self._unit for item in kept)],
            upper=(budget - problem.fixed) // self._unit,
        )

    def _keep(self, k: int, item: int) -> int:
        """Return a variable that must be 1 if `item` is in memory throughout interval k.

        The storage is in memory throughout if it is resident at the next cut, and neither
        recomputed nor swapped in during interval k.
        """
        if (k, item) not in self._kept:
            column = self._kept[k, item] = self.model.column()
            here = self._resident[k].get(item)
            minus = [other for other in self._available(k, item) if other != here]
            self.model.row(
                [column, self._resident[k + 1][item], *minus],
                [1.0, -1.0, *([1.0] * len(minus))],
                lower=0.0,
            )
        return self._kept[k, item]


def _last_use(problem: Problem) -> list[int]:
    """Return for each storage the last node that needs it, directly or through recomputations."""
    last = [-1] * len(problem.nbytes)
    for node in range(len(problem) - 1, -1, -1):
        reach = max([node, *(last[item] for item in problem.makes[node])])
        for item in problem.reads[node]:
            last[item] = max(last[item], reach)
    return last


def decode(problem: Problem, decisions: Decisions) -> list[int]:
    """Make a sequence of nodes that follows the decisions and recomputes as late as possible.

    The missing inputs of a node are recomputed just before the node. Items that must be resident at
    a cut are recomputed just before the cut. The sequence may exceed the budget.
    """
    steps: list[int] = []
    available: set[int] = set()

    def need(item: int) -> None:
        stack = [item]
        while stack:
            node = problem.maker[stack[-1]]
            missing = [i for i in problem.reads[node] if i not in available]
            if stack[-1] in available:
                stack.pop()
            elif missing:
                stack.append(max(missing))
            else:
                compute(node)

    def compute(node: int) -> None:
        steps.append(node)
        available.update(problem.makes[node])

    position = {cut: k for k, cut in enumerate(decisions.cuts)}
    for node in range(len(problem)):
        k = position.get(node)
        if k is not None:
            wanted = decisions.resident[k]
            for item in sorted(wanted):
                need(item)
            available = {
                item
                for item in available
                if item in wanted or not problem.replayable[problem.maker[item]]
            }
        for item in problem.reads[node]:
            need(item)
        compute(node)
        available.difference_update(problem.overwrites[node])
    return steps
