"""Plan by Revolve: optimal checkpoints on a homogeneous chain (Griewank and Walther, TOMS 2000).

The task: run l steps forward from an input that needs no slot, then visit the l values in reverse
order. Memory has s slots, each for one value. The least number of forward steps is

    P(0, s) = 0,    P(l, s) = min over 1 <= j <= l of  j + P(l - j, s - 1) + P(j - 1, s).

That is: advance to value j and keep j, reverse the values after j with one slot less, then free
the slot of j and reverse the values before j. Griewank's t(l, s) counts the input as a slot and as
a value, so P(l, s) = t(l + 1, s). The closed form of t is (their equation 2)

    t(l, s) = r l - C(s + r, r - 1)    with r the least number such that C(s + r, s) >= l.

In a chain of equal values there is an optimal schedule in which each saved value stays until its
backward step has used it (persistence; Griewank, OMS 1992). So P is the optimum of all schedules
for such a chain, and its cost is a proven lower bound.

On programs that are not chains, the same rule is applied to a row of checkpoint candidates
(`_line.py`). Each candidate counts as one step, whatever its cost. That is a heuristic, and its
plans have no bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Literal, final

from rekindle._types import Bytes
from rekindle.planners import _line
from rekindle.planners._base import Search, Watch
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan


@cache
def forwards(length: int, slots: int) -> int:
    """Return P(l, s), the least number of forward steps of a backward pass over a chain.

    Args:
        length: The number l of values of the chain.
        slots: The number s of values that memory can hold as checkpoints.
    """
    if length == 0:
        return 0
    if slots < 1:
        raise ValueError(
            f"got {slots} memory slots for checkpoints, wanted at least 1 to run the backward pass "
            f"of a chain of {length} values"
        )
    rounds = 0
    while comb(slots + rounds, slots) < length + 1:
        rounds += 1
    return rounds * (length + 1) - comb(slots + rounds, rounds - 1)


@cache
def split(length: int, slots: int) -> int:
    """Return the number j of the first value to keep, or the last j if several are optimal."""
    if slots == 1:
        return length
    return min(
        range(length, 0, -1),
        key=lambda j: j + forwards(length - j, slots - 1) + forwards(j - 1, slots),
    )


def optimum(problem: Problem, budget: Bytes) -> list[int] | None:
    """Return an optimal sequence of nodes for a homogeneous chain of n stages.

    Let f_i and b_i be the forward and the backward operator of stage i. While b_i runs, memory
    holds its gradient, its own result, and s values including f_i. While f_i is recomputed, memory
    holds one gradient, f_i, and at most s values. So a budget of B values has s = B - 2 slots.

    Returns:
        The sequence, or None if the program is not such a chain or no sequence fits the budget.
    """
    length = chain_length(problem)
    if length is None or not problem.nbytes[0]:
        return None
    slots = (budget - problem.fixed) // problem.nbytes[0] - 2
    if slots < 1:
        return None
    steps: list[int] = []
    todo: list[tuple[int, int, int]] = [(0, length, min(slots, length))]
    loss_is_due = True
    # An entry of `todo` is (start, number of values to reverse, slots). With 0 values it stands for
    # one backward step.
    while todo:
        start, values, free = todo.pop()
        if values == 0:
            if loss_is_due:
                steps.append(length)
                loss_is_due = False
            steps.append(2 * length - start)
            continue
        j = split(values, free)
        steps += range(start, start + j)
        kept = start + j  # number of the value to keep: the output of node kept - 1
        if j > 1:
            todo.append((start, j - 1, free))
        todo.append((kept - 1, 0, 0))
        if values > j:
            todo.append((kept, values - j, free - 1))
    return steps


def chain_length(problem: Problem) -> int | None:
    """Return the length N of a homogeneous chain, or None if the program is not one.

    The program must be f_0 .. f_{N-1}, loss, b_{N-1} .. b_0. All results must have equal sizes, and
    all forward operators f_i equal costs.
    """
    nodes = len(problem)
    length = (nodes - 1) // 2
    if nodes < 3 or nodes % 2 == 0 or problem.holds or len(problem.nbytes) != nodes:
        return None
    if len({*problem.nbytes}) > 1 or len({*problem.cost[:length]}) > 1:
        return None
    if any(problem.makes[node] != (node,) for node in range(nodes)) or not all(problem.replayable):
        return None
    for node in range(nodes):
        forward = 2 * length - node  # the number of the forward node, if `node` is a backward node
        wanted = {node - 1} if node else set[int]()
        if node > length:
            wanted.add(forward)
        if {*problem.reads[node]} != wanted:
            return None
    return length


@final
@dataclass(frozen=True)
class Revolve:
    """Planner of binomial checkpoints on a chain. Other programs are treated as a row of values.

    Args:
        line: The values that may be checkpoints: "articulation" points (`_line.py`), or "all".
    """

    line: Literal["articulation", "all"] = "articulation"

    @property
    def name(self) -> str:
        return "revolve" if self.line == "articulation" else "revolve-all"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch)
        if chain_length(problem) is not None:
            steps = optimum(problem, budget)
            if steps is not None:
                search.offer(steps)
                search.raise_bound(search.best.cost if search.best else 0)
            else:
                search.smallest = problem.floor
            return search.conclude()
        for steps in sequences(problem, self.line):
            search.offer(steps)
        return search.conclude()


def sequences(
    problem: Problem, line: Literal["articulation", "all"] = "all"
) -> Iterator[list[int]]:
    """Yield a sequence of nodes for each of many numbers of slots; more slots recompute less."""
    candidates = _line.candidates(problem, line)
    slots = 1
    while slots <= 2 * len(candidates):
        yield _line.reverse(problem, candidates, slots, split)
        slots = slots + 1 if slots < 16 else slots * 5 // 4
