"""Plan by Rotor: optimal checkpoints on heterogeneous chains by dynamic programming.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal re-materialization strategies for
heterogeneous chains" (arXiv 1911.13214, TOMS 2024). `_chain.py` describes the chain model.

Names: x_i is the input of stage i, y_i is the gradient of x_i, and X_{i+1} is everything that stage
i saves for its backward step. f_i and b_i are the times of the forward and the backward step,
forward_extra_i (extra_i if nothing is saved) and backward_extra_i their workspaces. The chain has L
stages, and memory is counted in M units.

**Persistent** (`persistent`): a saved value stays until its backward step has used it. C(i, l, m)
is the least time to compute y_i from x_i and y_{l+1}, in memory m without that of x_i. Either the
stages i to j-1 run without saving, and x_j is kept (*keep*), or stage i saves what its backward
step needs (*tape*). The first needs memory none(i, l), the second all(i, l):

    none(i, l) = y_{l+1} + max over i <= j < l of (x_j unless j = i) + x_{j+1} + extra_j
    all(i, l)  = max(y_{l+1} + X_{i+1} + forward_extra_i,
                     x_i + x_{i+1} + X_{i+1} + backward_extra_i)
    C(i, i, m) = f_i + b_i                                                    if m >= all(i, i)
    keep:  min over i < j <= l of  f_i + .. + f_{j-1} + C(j, l, m - x_j) + C(i, j-1, m)
                                                                               if m >= none(i, l)
    tape:  f_i + b_i + C(i+1, l, m - X_{i+1})                                  if m >= all(i, l)

In all(i, l) the taped forward runs while y_{l+1} is in memory. The published code tests y_{i+1}
instead, which refuses some schedules that fit and, rarely, returns one that does not. If keep and
tape take equal time, tape wins: with stages of cost 0 the published order inserts useless
checkpoints.

C(i, l, .) is one numpy vector over all m. For one (i, l), all j take one addition and one minimum.
So O(L^2) numpy calls make O(L^3 M) operations. Only C is stored. Whether keep or tape was best is
computed again for the few states that the schedule visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import final

import numpy as np
from numpy.typing import NDArray

from rekindle._types import Bytes
from rekindle.planners._base import Search, Watch
from rekindle.planners._chain import Chain, Kind, Operation
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan, Status
from rekindle.planners._stages import stages_of

Row = NDArray[np.float64]

# Shares of the budget to give to the dynamic program, until its plan fits. They matter for programs
# that are only nearly chains. The chain model counts some of their memory twice, so that a limit
# above the budget can be right. It misses other memory, so that a lower limit can be right.
_SHARES = (1.5, 1.3, 1.15, 1.05, 1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


@final
@dataclass(frozen=True)
class Rotor:
    """Planner that treats a program as a chain of stages, each of which reads the one before it.

    It finds the fastest schedule of those that keep a saved value until its backward step. A stage
    is recomputed as a whole. Schedules that recompute single operators can be faster, so the plan
    has no lower bound.

    Args:
        slots: The number of units into which the budget is divided. None: count memory exactly,
            which takes more time and memory.
    """

    slots: int | None = 500

    @property
    def name(self) -> str:
        return "rotor"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch)
        if any(problem.overwrites) or not all(problem.replayable):
            detail = (
                "every stage of a chain must be recomputable, but this program writes in place "
                "or reads values between stages"
            )
            return search.conclude(status=Status.UNSUITED, detail=detail)
        stages = stages_of(problem)
        limit = budget - problem.fixed
        for share in _SHARES:
            found = persistent(stages.chain, int(limit * share), slots=self.slots)
            if found.operations:
                search.offer(stages.steps(found.operations), f"{share} of the budget")
            if search.best is not None:
                break
        return search.conclude(detail=f"{len(stages.chain)} stages")


@final
@dataclass(frozen=True)
class ChainPlan:
    """Schedule for a chain of stages.

    If nothing fits, `time` is infinite and `operations` is empty.
    """

    time: float
    operations: tuple[Operation, ...]


def persistent(chain: Chain, limit: int, *, slots: int | None = 500) -> ChainPlan:
    """Find the best schedule in which a saved value stays until its backward step.

    Args:
        chain: The stages, with their times and sizes.
        limit: The memory limit, which includes the input x_0.
        slots: Count memory in units of limit / slots, with sizes rounded up. The schedule then
            fits, but is not always the best. None: exact, in units of the greatest common divisor
            of all sizes.
    """
    unit = _exact_unit(chain)
    if slots is not None:
        unit = max(unit, -(-limit // slots))
    table = Table(chain.in_units(unit), limit // unit)
    return ChainPlan(table.time, table.operations())


def _exact_unit(chain: Chain) -> int:
    return gcd(*chain.value, *chain.tape, *chain.forward_extra, *chain.backward_extra) or 1


@final
class Table:
    """Table of the dynamic program for persistent schedules.

    `rows[i][l - i]` is the vector of C(i, l, m) for m = 0 .. room. C(i, l, m) is the least time to
    run the forward and backward steps of the stages i to l, in memory m (see the module).
    """

    def __init__(self, chain: Chain, limit: int) -> None:
        self.chain = chain
        self.room = limit - chain.value[0]
        last = len(chain)
        # entry i: total time of the forwards before stage i
        self.forward = np.concatenate([[0.0], np.cumsum(chain.forward)])
        self.rows: list[Row] = []
        if self.room >= 0:
            self.rows = [np.full((last + 1 - i, self.room + 1), np.inf) for i in range(last + 1)]
            for stage in range(last + 1):
                self._column(stage)

    @property
    def time(self) -> float:
        return float(self.rows[0][-1, self.room]) if self.rows else float("inf")

    def _column(self, l: int) -> None:  # noqa: E741 - the papers' name
        """Compute C(i, l, m) for all i and all m, from i = l down to i = 0.

        C(i, l, m) is the least time for the stages i to l in memory m.
        """
        chain, width = self.chain, self.room + 1
        # shifted[j] is C(j, l, m - x_j) + f_0 + .. + f_{j-1}: the part of the sum for keep that
        # does not depend on i.
        shifted = np.full((l + 1, width), np.inf)
        sums = np.empty((l + 1, width))
        none = self.none_needs(l)
        for i in range(l, -1, -1):
            row = self.rows[i][l - i]
            need = self.all_needs(i, l)
            if i == l:
                row[need:] = self.once(i)
            else:
                if l > i and none[i] < width:
                    np.add(shifted[i + 1 :], self.rows[i][: l - i], out=sums[: l - i])
                    best = sums[: l - i].min(axis=0) - self.forward[i]
                    row[none[i] :] = best[none[i] :]
                tape = chain.tape[i]
                start = max(need, tape)
                if start < width:
                    taped = self.rows[i + 1][l - i - 1][start - tape : width - tape]
                    row[start:] = np.minimum(row[start:], taped + self.once(i))
            x = chain.value[i]
            if x < width:
                shifted[i, x:] = row[: width - x] + self.forward[i]

    def once(self, i: int) -> float:
        """Return the time of one forward and one backward of stage i; for i = L, of the loss."""
        forward = self.chain.forward[i] if i < len(self.chain) else 0.0
        return forward + self.chain.backward[i]

    def gradient(self, l: int) -> int:  # noqa: E741
        """Return the size of the gradient y_{l+1}; 0 if stage l is the loss."""
        return self.chain.value[l + 1] if l < len(self.chain) else 0

    def all_needs(self, i: int, l: int) -> int:  # noqa: E741
        """Return all(i, l), the memory that a taped forward and the backward of stage i need."""
        chain = self.chain
        if i == len(chain):  # the loss needs y_L and its own transient; m does not include x_L
            return chain.value[i] + chain.backward_extra[i]
        tape, x, y = chain.tape[i], chain.value[i], chain.value[i + 1]
        return max(
            self.gradient(l) + tape + chain.forward_extra[i], x + y + tape + chain.backward_extra[i]
        )

    def none_needs(self, l: int) -> list[int]:  # noqa: E741
        """Return for every i < l none(i, l), the memory that untaped forwards i .. l-1 need."""
        chain = self.chain
        needs = [0] * (l + 1)
        rest = 0  # the largest need of the forwards after stage i
        for i in range(l - 1, -1, -1):
            first = chain.value[i + 1] + chain.forward_extra[i]
            needs[i] = self.gradient(l) + max(first, rest)
            rest = max(rest, chain.value[i] + first)
        return needs

    def operations(self) -> tuple[Operation, ...]:
        """Return the optimal schedule, found by computing again which term gave each minimum."""
        if not self.rows or not np.isfinite(self.time):
            return ()
        done: list[Operation] = []
        todo: list[tuple[int, int, int] | Operation] = [(0, len(self.chain), self.room)]
        while todo:
            task = todo.pop()
            if isinstance(task, Operation):
                done.append(task)
                continue
            i, l, m = task  # noqa: E741
            if i == len(self.chain):
                done.append(Operation(Kind.LOSS, i))
            elif i == l:
                done += [Operation(Kind.TAPE, i), Operation(Kind.BACK, i)]
            else:
                j = self._choice(i, l, m)
                if j is None:
                    done.append(Operation(Kind.TAPE, i))
                    todo += [Operation(Kind.BACK, i), (i + 1, l, m - self.chain.tape[i])]
                else:
                    done.append(Operation(Kind.KEEP, i))
                    done += [Operation(Kind.DROP, stage) for stage in range(i + 1, j)]
                    todo += [(i, j - 1, m), (j, l, m - self.chain.value[j])]
        return tuple(done)

    def _choice(self, i: int, l: int, m: int) -> int | None:  # noqa: E741
        """Return what the best schedule does first for the stages i to l in memory m.

        Returns:
            The stage j whose input is kept as the next checkpoint. None if stage i saves what its
            backward step needs (a tape), also if both take equal time.
        """
        tape, best, choice = self.chain.tape[i], float("inf"), None
        if m >= max(self.all_needs(i, l), tape):
            best = float(self.rows[i + 1][l - i - 1, m - tape]) + self.once(i)
        if m >= self.none_needs(l)[i]:
            for j in range(i + 1, l + 1):
                x = self.chain.value[j]
                if m >= x:
                    right = float(self.rows[j][l - j, m - x])
                    left = float(self.rows[i][j - 1 - i, m])
                    time = float(self.forward[j] - self.forward[i]) + right + left
                    if time < best * (1 - 1e-12):  # smaller differences are rounding errors of sums
                        best, choice = time, j
        return choice
