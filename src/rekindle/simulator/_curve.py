"""How a program would fare within every budget, down to the smallest that the engine manages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import RIGHT, NoRoom, Thrashed
from rekindle.policies import Policy
from rekindle.schedule import Record
from rekindle.simulator._replay import replay
from rekindle.trace import Trace, keep_all_peak, largest_need

MOST_OVERHEAD = 10
"""A budget under which recomputation takes longer than so many runs counts as too small."""


@final
@dataclass(frozen=True, slots=True)
class Point:
    """What recomputation costs within a budget (bytes): ns, and operators that run again."""

    budget: Bytes
    recompute_ns: Nanoseconds
    recomputations: int


def fits(trace: Trace, budget: Bytes, policy: Policy) -> Record | None:
    """The run of `trace` within `budget`; None where there is none, or none in finite time."""
    rules = replace(RIGHT, recompute_limit=MOST_OVERHEAD * max(1, trace.compute_ns))
    try:
        return replay(trace, budget=budget, policy=policy, rules=rules)
    except (NoRoom, Thrashed):
        return None


def smallest_budget(trace: Trace, policy: Policy, *, above: Bytes = 0) -> Bytes:
    """A budget of at least `above` with which the engine gets through: bisection, to 1 %."""
    low, high = max(above, largest_need(trace)), keep_all_peak(trace)
    if low >= high or fits(trace, low, policy):
        return low
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        if fits(trace, middle, policy) is None:
            low = middle
        else:
            high = middle
    return high


def curve(
    trace: Trace,
    policy: Policy,
    *,
    points: int = 16,
    watch: Callable[[int, int], None] = lambda done, of: None,
) -> list[Point]:
    """Runs within `points` budgets from keeping everything down to the smallest feasible one.

    The largest budget first. Made monotone: where a smaller budget happens to be the faster one,
    it gets the time of the larger. Budgets between that fail are left out.
    """
    most, least = keep_all_peak(trace), smallest_budget(trace, policy)
    budgets = [most - (most - least) * i // max(1, points - 1) for i in range(points)]
    found: list[Point] = []
    slowest, operators = 0, 0
    for number, budget in enumerate(dict.fromkeys(budgets)):
        watch(number, points)
        record = fits(trace, budget, policy)
        if record is not None:
            slowest = max(slowest, record.recompute_ns)
            operators = max(operators, record.recomputations)
            found.append(Point(budget, slowest, operators))
    return found
