"""A schedule that somebody else made, as a plan: a run of DTR, a record, a file.

So that online and ahead-of-time answers are compared on one problem, and to begin a search with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes
from rekindle.planners._base import Search, Watch
from rekindle.planners._problem import Problem
from rekindle.planners._result import Plan, Status
from rekindle.schedule import Compute, Schedule, verify


@final
@dataclass(frozen=True)
class Given:
    """Judges `schedule` as it is, within the budget. None: whoever made it found none."""

    name: str
    schedule: Schedule | None
    smallest_budget: Bytes | None = None

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        search = Search(problem, budget, self.name, watch)
        search.smallest = self.smallest_budget
        if self.schedule is None:
            return search.conclude()
        cost = verify(problem.trace, self.schedule, budget)
        return Plan(
            self.name,
            Status.FEASIBLE if cost.recompute_ns else Status.OPTIMAL,
            budget,
            cost.compute_ns,
            cost.compute_ns,
            search.seconds,
            self.schedule,
            cost.recompute_ns,
            cost.peak,
            needed=problem.floor,
        )


def steps_of(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """The nodes that a schedule computes, in order; views and constants are no nodes.

    Moments at which the program reads follow the node before them.
    """
    node_of = {op: node for node, op in enumerate(problem.op) if op is not None}
    steps: list[int] = []
    following = 0  # the next node to run for the first time
    for action in schedule.actions:
        if not isinstance(action, Compute) or action.op not in node_of:
            continue
        node = node_of[action.op]
        while following < node and problem.op[following] is None:
            steps.append(following)
            following += 1
        if node == following:
            following += 1
        elif not problem.makes[node]:
            continue  # a view made again
        steps.append(node)
    steps += range(following, len(problem))
    return tuple(steps)
