"""Simulate a trace within many budgets, down to the smallest budget with which the run succeeds.

`rekindle.profile`, `rekindle.max_batch` and the planners use this module.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import Policy
from rekindle.schedule import Record
from rekindle.simulator._replay import replay
from rekindle.trace import Trace, keep_all_peak, largest_need

MOST_OVERHEAD = 10
"""Most recomputation that a budget may need, as a multiple of the program's time.
"""


@final
@dataclass(frozen=True, slots=True)
class Point:
    """Result of a simulation: budget (bytes), time (ns) and number of recomputed operators."""

    budget: Bytes
    recompute_ns: Nanoseconds
    recomputations: int


def fits(trace: Trace, budget: Bytes, policy: Policy) -> Record | None:
    """Return the record of a run within `budget`, or None if the budget is too small."""
    limit = MOST_OVERHEAD * max(1, trace.compute_ns)
    try:
        return replay(trace, budget=budget, policy=policy, recompute_limit=limit)
    except (NoRoom, Thrashed):
        return None


def smallest_budget(
    trace: Trace, policy: Policy, *, above: Bytes = 0, other_times: int = 0
) -> Bytes:
    """Find the smallest budget (bytes) with which a simulated run succeeds, by bisection to 1 %.

    Args:
        trace: The recorded program: operators, storages and events.
        policy: The policy that selects storages to evict.
        above: A lower limit of the result.
        other_times: The run must also succeed if the operators take other times: in so many further
            simulations, each with other times. A program measures other times in every run,
            so a policy that depends on them evicts other storages.
    """
    found, before = _smallest_budget(trace, policy, above), -1
    # A larger budget may be too small for times with which a smaller one sufficed: simulate again.
    while other_times and found != before:
        before = found
        for seed in range(other_times):
            found = _smallest_budget(_with_other_times(trace, seed), policy, found)
        found = _smallest_budget(trace, policy, found)
    return found


def _with_other_times(trace: Trace, seed: int) -> Trace:
    """Return the trace with the cost of each operator multiplied by a factor from 1/4 to 4."""
    draw = random.Random(seed)
    ops = [replace(op, cost=int(op.cost * 2 ** draw.uniform(-2, 2))) for op in trace.ops]
    return replace(trace, ops=type(trace.ops)(ops))


def _smallest_budget(trace: Trace, policy: Policy, above: Bytes) -> Bytes:
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
    """Simulate a trace within evenly spaced budgets.

    The largest budget is the peak without evictions. The smallest budget is the smallest one with
    which a run succeeds. The curve is made monotone: a smaller budget that happens to be faster
    than a larger one gets the time of the larger one. Budgets with which the run fails are left
    out.

    Args:
        trace: The recorded program: operators, storages and events.
        policy: The policy that selects storages to evict.
        points: The number of budgets.
        watch: A function that is called with (budgets done, number of budgets).

    Returns:
        The points, the largest budget first.
    """
    most, least = keep_all_peak(trace), smallest_budget(trace, policy)
    budgets = [most - (most - least) * i // max(1, points - 1) for i in range(points)]
    found: list[Point] = []
    slowest, operators = 0, 0
    different = dict.fromkeys(budgets)
    for number, budget in enumerate(different):
        watch(number, len(different))
        record = fits(trace, budget, policy)
        if record is not None:
            slowest = max(slowest, record.recompute_ns)
            operators = max(operators, record.recomputations)
            found.append(Point(budget, slowest, operators))
    return found
