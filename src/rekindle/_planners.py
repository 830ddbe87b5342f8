"""The planners by name, and DTR among them: the simulator's run of it, judged as a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument
from rekindle._types import Bytes
from rekindle.engine import RIGHT, NoRoom, Thrashed
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
    Status,
)
from rekindle.planners._base import Watch
from rekindle.planners.given import steps_of
from rekindle.policies import DEFAULT, DTR, MSPS, Policy, Swap
from rekindle.schedule import Schedule, verify
from rekindle.simulator import replay, smallest_budget

# Times the program: a run that recomputes for longer is no good beginning. It takes long, too.
LONGEST: Final = 10
_QUICK: Final = 1  # while no other plan is known
# Shares of the time for a budget that would do, all together and for one try; any plan is enough.
_ASIDE, _TRY, _ENOUGH = 0.25, 0.02, 10.0


def halfway(problem: Problem) -> Bytes:
    """A budget where nobody says one: between what no schedule can do with less and keep-all."""
    return (problem.floor + problem.keep_all_peak) // 2


@final
@dataclass(frozen=True)
class Online:
    """What the online engine does, as a planner: it sees the program only as it runs.

    With `swap` what it lets go may go to the host. It recomputes for no longer than `limit` times
    the program.
    """

    policy: Policy
    swap: Swap | None = None
    limit: float | None = None

    @property
    def name(self) -> str:
        return "dtr"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        schedule = self.schedule(problem, budget)
        smallest = None
        if schedule is None and self.swap is None:
            smallest = smallest_budget(problem.trace, self.policy, above=budget)
        given = Given(self.name, schedule, smallest, self.swap)
        return given.plan(problem, budget, watch=watch)

    def schedule(self, problem: Problem, budget: Bytes) -> Schedule | None:
        """The actions of a run within `budget`; None where the engine finds no room, or no end."""
        longest = None if self.limit is None else int(self.limit * problem.compute_ns)
        rules = replace(RIGHT, recompute_limit=longest)
        try:
            run = replay(
                problem.trace, budget=budget, policy=self.policy, rules=rules, swap=self.swap
            )
        except (NoRoom, Thrashed):
            return None
        return run.schedule


@final
@dataclass(frozen=True)
class WarmCuts:
    """The cut relaxation, begun with an online run; and what other policies do where it fails.

    The plan is never slower than that run, unless it recomputes for more than ten times as long as
    the program takes. With `swap` it begins with three: one that recomputes, one that swaps, one
    that chooses.
    """

    time_limit: float
    gap: float = 0.0
    swap: Swap | None = None

    @property
    def name(self) -> str:
        return "cuts"

    def plan(self, problem: Problem, budget: Bytes, *, watch: Watch | None = None) -> Plan:
        if self.swap is not None:
            return self._mixed(problem, budget, watch, self.swap)
        run = Online(DEFAULT, limit=_QUICK).schedule(problem, budget)
        plan = self._cuts(_steps(problem, [run])).plan(problem, budget, watch=watch)
        if plan.status is Status.NOT_FOUND:
            policies = DEFAULT, DTR(), MSPS()
            runs = [Online(each, limit=LONGEST).schedule(problem, budget) for each in policies]
            run, warm = runs[0], _steps(problem, runs)
            if warm:
                plan = self._cuts(warm).plan(problem, budget, watch=watch)
        elif plan.recompute_ns is not None and plan.recompute_ns > _QUICK * problem.compute_ns:
            limit = min(LONGEST, plan.recompute_ns / problem.compute_ns)
            run = Online(DEFAULT, limit=limit).schedule(problem, budget)
        if run is not None:
            return _no_dearer(plan, problem, run)
        return plan if plan.schedule is not None else self._with_smallest(plan, problem)

    def _with_smallest(self, plan: Plan, problem: Problem) -> Plan:
        """`plan`, which has no schedule, with the smallest budget for which there is one: what an
        online run gets through with, and less, tried by bisection."""
        until = time.perf_counter() + _ASIDE * self.time_limit
        low = max(plan.budget, problem.floor - 1)
        high = smallest_budget(problem.trace, DEFAULT, above=low + 1)
        if plan.smallest_budget is not None:
            high = min(high, plan.smallest_budget)
        while high - low > 0.01 * high and (left := until - time.perf_counter()) > 0:
            middle = (low + high) // 2
            quick = WarmCuts(min(left, _TRY * self.time_limit), _ENOUGH)._cuts(())
            if quick.plan(problem, middle).schedule is None:
                low = middle
            else:  # not its peak: whoever plans for that one might not find the same
                high = middle
        return replace(plan, smallest_budget=high)

    def _mixed(self, problem: Problem, budget: Bytes, watch: Watch | None, swap: Swap) -> Plan:
        ways = None, replace(swap, only=True), replace(swap, only=False)
        runs = [Online(DEFAULT, way, LONGEST).schedule(problem, budget) for way in ways]
        known = tuple(run for run in runs if run is not None)
        planner = self._cuts(_steps(problem, runs[:1]), known)
        return planner.plan(problem, budget, watch=watch)

    def _cuts(self, warm: tuple[tuple[int, ...], ...], known: tuple[Schedule, ...] = ()) -> Planner:
        from rekindle.planners.cuts import Cuts

        return Cuts(self.time_limit, self.gap, warm_start=warm, swap=self.swap, known=known)


def _steps(problem: Problem, runs: Sequence[Schedule | None]) -> tuple[tuple[int, ...], ...]:
    return tuple(steps_of(problem, run) for run in runs if run is not None)


def _no_dearer(plan: Plan, problem: Problem, run: Schedule) -> Plan:
    """`plan`, or `run` in its place: written down, a sequence may run views again that cost time,
    which the search does not count."""
    cost = verify(problem.trace, run, plan.budget)
    if plan.cost_ns is None or cost.total_ns >= plan.cost_ns:
        return plan
    return replace(
        plan,
        status=Status.OPTIMAL if cost.total_ns <= plan.bound_ns else Status.FEASIBLE,
        bound_ns=min(plan.bound_ns, cost.total_ns),
        schedule=replace(run, made_by=plan.planner),
        recompute_ns=cost.recompute_ns,
        peak=cost.peak,
    )


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

SWAPPING: dict[str, Callable[[float, Swap], Planner]] = {
    "cuts": lambda time_limit, swap: WarmCuts(time_limit, swap=swap),
    "dtr": lambda _, swap: Online(DTR(), swap),
}
"""Those that can also swap."""


def given_planner(
    planner: Planner | type[Planner] | str | None, line: str, seconds: float
) -> Planner | None:
    """The planner that is meant: one, its name, its class (with the defaults), None: the default.

    One that is named searches for `seconds`. Raises `InvalidArgument` for anything else; `line` is
    what the user wrote, with {} for the planner.
    """
    if planner is None:
        return None
    if isinstance(planner, str):
        name = checks.one_of(planner.strip().lower(), tuple(PLANNERS), line)
        return None if name == "cuts" else PLANNERS[name](seconds)
    found: Any = planner
    if isinstance(planner, type):
        found = checks.function(planner, line, '"rotor"')()
    if not callable(getattr(found, "plan", None)):
        raise InvalidArgument(
            f"{line.format(repr(planner))}: wanted one of rekindle.planners, or its name; write "
            + line.format("rekindle.planners.Rotor()")
        )
    return found
