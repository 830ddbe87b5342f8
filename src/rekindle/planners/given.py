"""Make a plan from an existing schedule, such as the schedule of a simulated or recorded run.

Users compare online runs with plans this way. `steps_of` converts a schedule to a sequence of nodes
(`_sequence.py`), from which the search of a planner can start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes
from rekindle.planners._base import Search, Watch
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan, Status
from rekindle.policies.swap import Swap
from rekindle.schedule import Compute, Free, Schedule, SwapIn, SwapOut, verify


@final
@dataclass(frozen=True)
class Given:
    """Planner that verifies a given schedule and returns it unchanged.

    Args:
        name: The name of the planner.
        schedule: The schedule. None: the planner or policy that should make it found none.
        smallest_budget: If `schedule` is None, the smallest budget for which one is known.
        swap: The bandwidth of copies, if the schedule has any.
    """

    name: str
    schedule: Schedule | None
    smallest_budget: Bytes | None = None
    swap: Swap | None = None

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch)
        search.smallest = self.smallest_budget
        if self.schedule is None:
            return search.conclude()
        cost = verify(problem.trace, self.schedule, budget, swap=self.swap)
        return Plan(
            self.name,
            Status.FEASIBLE if cost.overhead else Status.OPTIMAL,
            budget,
            cost.compute_ns,
            cost.compute_ns,
            search.seconds,
            self.schedule,
            cost.recompute_ns,
            cost.peak,
            needed=problem.floor,
            waiting_ns=cost.waiting_ns,
            swapped_out=cost.swapped_out,
        )


def steps_of(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Convert a schedule to a sequence of nodes, without operators that make views or parameters.

    A moment at which the program reads a value comes right after the node before it. A swap-in
    moves to the step before the first reader of the storage.
    """
    item_of = {storage: item for item, storage in enumerate(problem.storage)}
    node_of = {op: node for node, op in enumerate(problem.op) if op is not None}
    steps: list[int] = []
    coming: set[int] = set()  # items that were swapped in, and not read since then
    following = 0  # the next node to run for the first time

    def run(node: int) -> None:
        for item in problem.reads[node]:
            if item in coming:
                coming.remove(item)
                steps.append(~item)
        coming.difference_update(problem.makes[node])
        steps.append(node)

    for action in schedule.actions:
        match action:
            case SwapIn(storage):
                coming.add(item_of[storage])
            case Free(storage) | SwapOut(storage, keep=False):
                coming.discard(item_of.get(storage, -1))
            case Compute(op) if op in node_of:
                node = node_of[op]
                while following < node and problem.op[following] is None:
                    run(following)
                    following += 1
                if node == following:
                    following += 1
                elif not problem.makes[node]:
                    continue  # The operator makes a view again, and views are not nodes.
                run(node)
            case _:
                pass
    for node in range(following, len(problem)):
        run(node)
    return tuple(steps)
