"""Name the planners, and combine planners with the simulator.

`rekindle.planners` must not import the simulator, so that no planner judges its own plans.
Therefore the two planners that use the simulator are here. `Online` simulates a run in which a
policy (DTR's) decides what to evict, and returns the run's actions as a plan. `WarmCuts` starts the
planner `Cuts` from such runs.
`rekindle.plan`, `rekindle.backend` and the command line look planners up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from rekindle import _checks as checks
from rekindle import _clock
from rekindle._errors import InvalidArgument
from rekindle._types import Bytes
from rekindle.engine import NoRoom, Thrashed
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

# Limit on recomputation, as a multiple of the program's own time, in a plan that is not proven
# optimal, and in a simulated run from which a search starts. A run that recomputes longer is a bad
# start and slow to simulate. A longer plan has millions of steps.
LONGEST: Final = 10
_QUICK: Final = 1  # the same limit for the first simulated run, before any plan is known
# Settings of the search for the smallest budget that has a plan. _ASIDE is its share of the time
# limit, and _TRY the share of one attempt. An attempt stops at a plan that costs at most the share
# _ENOUGH above the lower bound. This share is large, because any plan within `LONGEST` shows that
# the budget suffices.
_ASIDE, _TRY, _ENOUGH = 0.25, 0.02, 10.0


def halfway(problem: Problem) -> Bytes:
    """Return the default budget: half way between `problem.floor` and the peak without evictions.

    No schedule fits into less than `problem.floor`.
    """
    return (problem.floor + problem.keep_all_peak) // 2


@final
@dataclass(frozen=True)
class Online:
    """Planner whose plan has the actions of a simulated run of the online engine.

    The engine sees each operator only when the operator runs. So the plan is usually worse than
    that of a planner that knows the whole trace.

    Attributes:
        policy: The policy that selects storages to evict.
        swap: If given, evicted values may also be swapped out to the host.
        limit: The longest recomputation, as a multiple of the program's own time. None: no limit.
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
        """Return the actions of a run within `budget`, or None if the run fails.

        A run fails if an operator does not fit, or if it recomputes for longer than `limit` allows.
        """
        longest = None if self.limit is None else int(self.limit * problem.compute_ns)
        try:
            run = replay(
                problem.trace,
                budget=budget,
                policy=self.policy,
                recompute_limit=longest,
                swap=self.swap,
            )
        except (NoRoom, Thrashed):
            return None
        return run.schedule


@final
@dataclass(frozen=True)
class WarmCuts:
    """Planner that starts the planner `Cuts` from a simulated run of the online engine.

    If `Cuts` finds no plan, it starts again from runs with other eviction policies. The plan is
    never slower than the first run, unless the run recomputes for more than ten times the program's
    own time. A plan that recomputes longer is returned only if it is proven optimal. With `swap`,
    `Cuts` starts from three runs: one only recomputes, one only swaps, and one does both.

    Attributes:
        time_limit: Seconds for the search.
        gap: The search stops when the plan costs at most this share more than the lower bound.
        swap: If given, values may also be swapped, at this bandwidth.
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
        runs = _runs(problem, budget, [DEFAULT], _QUICK)
        plan = self._cuts(_steps(problem, runs)).plan(problem, budget, watch=watch)
        if plan.status is Status.NOT_FOUND:
            runs = _runs(problem, budget, [DEFAULT, DTR(), MSPS()], LONGEST)
            if runs:
                plan = self._cuts(_steps(problem, runs)).plan(problem, budget, watch=watch)
        elif plan.recompute_ns is not None and plan.recompute_ns > _QUICK * problem.compute_ns:
            limit = min(LONGEST, plan.recompute_ns / problem.compute_ns)
            runs = _runs(problem, budget, [DEFAULT], limit)
        for run in runs:
            plan = _no_dearer(plan, problem, run)
        plan = unless_endless(plan)
        return plan if plan.schedule is not None else self._with_smallest(plan, problem)

    def _with_smallest(self, plan: Plan, problem: Problem) -> Plan:
        """Add to `plan`, which has no schedule, the smallest budget that is known to have a plan.

        The search bisects between the failed budget and the smallest budget of an online run.
        """
        until = _clock.seconds() + _ASIDE * self.time_limit
        low = max(plan.budget, problem.floor - 1)
        high = smallest_budget(problem.trace, DEFAULT, above=low + 1)
        if plan.smallest_budget is not None:
            high = min(high, plan.smallest_budget)
        if not self._has_plan(problem, high, _TRY * self.time_limit):
            low, high = high, problem.keep_all_peak
        while high - low > 0.01 * high and (left := until - _clock.seconds()) > 0:
            middle = (low + high) // 2
            if self._has_plan(problem, middle, min(left, _TRY * self.time_limit)):
                # The peak of this plan may be below `middle`. But the planner might find no plan if
                # that peak were its budget. So `middle` is the smallest budget that is known to
                # work.
                high = middle
            else:
                low = middle
        return replace(plan, smallest_budget=high)

    def _has_plan(self, problem: Problem, budget: Bytes, seconds: float) -> bool:
        """Search for a plan for a short time, and return True if there is one."""
        if _runs(problem, budget, [DEFAULT], LONGEST):
            return True
        plan = WarmCuts(seconds, _ENOUGH)._cuts(()).plan(problem, budget)
        return unless_endless(plan).schedule is not None

    def _mixed(self, problem: Problem, budget: Bytes, watch: Watch | None, swap: Swap) -> Plan:
        """Plan with swapping; the search starts from three simulated runs of the online engine."""
        ways = None, replace(swap, only=True), replace(swap, only=False)
        runs = [Online(DEFAULT, way, LONGEST).schedule(problem, budget) for way in ways]
        known = tuple(run for run in runs if run is not None)
        recomputed = [runs[0]] if runs[0] is not None else []
        planner = self._cuts(_steps(problem, recomputed), known)
        return planner.plan(problem, budget, watch=watch)

    def _cuts(self, warm: tuple[tuple[int, ...], ...], known: tuple[Schedule, ...] = ()) -> Planner:
        from rekindle.planners.cuts import Cuts

        return Cuts(self.time_limit, self.gap, warm_start=warm, swap=self.swap, known=known)


def _runs(
    problem: Problem, budget: Bytes, policies: Sequence[Policy], limit: float
) -> list[Schedule]:
    """Simulate a run with each policy. Return the schedules of the runs that fit `budget`."""
    runs = [Online(policy, limit=limit).schedule(problem, budget) for policy in policies]
    return [run for run in runs if run is not None]


def _steps(problem: Problem, runs: Sequence[Schedule]) -> tuple[tuple[int, ...], ...]:
    return tuple(steps_of(problem, run) for run in runs)


def _no_dearer(plan: Plan, problem: Problem, run: Schedule) -> Plan:
    """Return the cheaper of `plan`, which `Cuts` made, and a plan with the actions of `run`.

    `Cuts` started from the simulated run `run`, but can return a plan that costs more. The reason
    is that it does not count the time of views, and its schedule may run some views again. If
    `Cuts` ran out of time, it may have found no plan at all.
    """
    cost = verify(problem.trace, run, plan.budget)
    if plan.cost_ns is not None and plan.cost_ns <= cost.total_ns:
        return plan
    return replace(
        plan,
        status=Status.OPTIMAL if cost.total_ns <= plan.bound_ns else Status.FEASIBLE,
        bound_ns=min(plan.bound_ns, cost.total_ns),
        schedule=replace(run, made_by=plan.planner),
        recompute_ns=cost.recompute_ns,
        peak=cost.peak,
        smallest_budget=None,
    )


def unless_endless(plan: Plan) -> Plan:
    """Return `plan`, without its schedule if this recomputes for too long and is not optimal."""
    recompute_ns = plan.recompute_ns or 0
    if plan.status is Status.OPTIMAL or recompute_ns <= LONGEST * plan.compute_ns:
        return plan
    return replace(
        plan,
        status=Status.NOT_FOUND,
        schedule=None,
        recompute_ns=None,
        peak=None,
        detail=f"all plans found recompute for more than {LONGEST} times the program's own time",
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
"""Functions from a time limit (seconds) to a planner, by its name on the command line."""

SWAPPING: dict[str, Callable[[float, Swap], Planner]] = {
    "cuts": lambda time_limit, swap: WarmCuts(time_limit, swap=swap),
    "dtr": lambda _, swap: Online(DTR(), swap),
}
"""Functions that make the planners which can also swap, by the planner's name."""


def given_planner(
    planner: Planner | type[Planner] | str | None, line: str, seconds: float
) -> Planner | None:
    """Check the argument `planner` of a public function, and return a planner for it.

    Args:
        planner: A planner, its name, or its class, which is called without arguments.
        line: The user's source line, with {} for the planner, for the error message.
        seconds: The time limit for a planner that is given by name.

    Returns:
        The planner, or None if `planner` means the default planner.

    Raises:
        InvalidArgument: `planner` is none of these.
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
            f"{line.format(repr(planner))}: wanted a planner of rekindle.planners, or the name of "
            "one; write " + line.format("rekindle.planners.Rotor()")
        )
    return found
