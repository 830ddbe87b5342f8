"""The planners by name, and DTR among them: the simulator's run of it, judged as a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from rekindle._types import Bytes
from rekindle.engine import NoRoom
from rekindle.planners import (
    ChenGreedy,
    ChenSqrt,
    Given,
    KeepAll,
    Plan,
    Planner,
    Problem,
    RecomputeAll,
    Revolve,
    Rotor,
)
from rekindle.planners._base import Watch
from rekindle.planners.given import steps_of
from rekindle.policies import DTR, Policy
from rekindle.schedule import Schedule
from rekindle.simulator import replay, smallest_budget


@final
@dataclass(frozen=True)
class Online:
    """What the online engine does, as a planner: it sees the program only as it runs."""

    policy: Policy

    @property
    def name(self) -> str:
        return "dtr"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        schedule = self.schedule(problem, budget)
        smallest = None
        if schedule is None:
            smallest = smallest_budget(problem.trace, self.policy, above=budget)
        return Given(self.name, schedule, smallest).plan(problem, budget, watch=watch)

    def schedule(self, problem: Problem, budget: Bytes) -> Schedule | None:
        """The actions of a run within `budget`; None where the engine finds no room."""
        try:
            return replay(problem.trace, budget=budget, policy=self.policy).schedule
        except NoRoom:
            return None


@final
@dataclass(frozen=True)
class WarmCuts:
    """The cut relaxation, begun with a run of DTR."""

    time_limit: float
    gap: float = 0.0

    @property
    def name(self) -> str:
        return "cuts"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        from rekindle.planners.cuts import Cuts

        run = Online(DTR()).schedule(problem, budget)
        warm = () if run is None else (steps_of(problem, run),)
        return Cuts(self.time_limit, self.gap, warm_start=warm).plan(problem, budget, watch=watch)


def _checkmate(time_limit: float) -> Planner:
    from rekindle.planners.checkmate import Checkmate

    return Checkmate(time_limit)


def _rounding(time_limit: float) -> Planner:
    from rekindle.planners.checkmate import Rounding

    return Rounding(time_limit)


PLANNERS: dict[str, Callable[[float], Planner]] = {
    "cuts": WarmCuts,
    "checkmate": _checkmate,
    "checkmate-rounding": _rounding,
    "rotor": lambda _: Rotor(),
    "revolve": lambda _: Revolve(),
    "revolve-all": lambda _: Revolve("all"),
    "chen-sqrt": lambda _: ChenSqrt(),
    "chen-sqrt-all": lambda _: ChenSqrt("all"),
    "chen-greedy": lambda _: ChenGreedy(),
    "chen-greedy-all": lambda _: ChenGreedy("all"),
    "dtr": lambda _: Online(DTR()),
    "keep-all": lambda _: KeepAll(),
    "recompute-all": lambda _: RecomputeAll(),
}
"""By the name on the command line; each takes the time limit in seconds."""
