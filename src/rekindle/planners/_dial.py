"""Find the best schedule for a measured chain of stages (`rekindle.sequential`).

Rotor's dynamic program (`rotor.py`) takes a memory limit, but rounds sizes up, so its schedules use
less than the limit. `_costs.py` computes the real peak of a schedule. This module bisects the limit
until the real peak just fits the budget.
"""

from __future__ import annotations

from rekindle._types import Bytes
from rekindle.planners._chain import Operation
from rekindle.planners._costs import ChainSchedule, Measured
from rekindle.planners.rotor import persistent

_TURNS = 16  # steps of the bisection, which find the memory limit to 1 / 65,536 of its range


def best_schedule(measured: Measured, budget: Bytes, *, slots: int | None = 500) -> ChainSchedule:
    """Find the fastest schedule for a measured chain whose peak fits the budget.

    Args:
        measured: The measured figures of the chain.
        budget: The budget (bytes).
        slots: The number of units into which the dynamic program divides memory. None: exact.

    Returns:
        The fastest schedule found that fits. If none fits, the schedule with the lowest peak.
    """
    everything = _schedule(measured, measured.keep_all)
    if everything.peak <= budget:
        return everything
    chain = measured.chain
    fitting: list[ChainSchedule] = []
    found: list[ChainSchedule] = [everything]
    low, high = 0, sum(chain.value) + sum(chain.tape) + 2 * everything.peak
    for _ in range(_TURNS):
        limit = (low + high) // 2
        operations = persistent(chain, limit, slots=slots).operations
        schedule = _schedule(measured, operations) if operations else None
        if schedule is not None:
            found.append(schedule)
        if schedule is not None and schedule.peak <= budget:
            fitting.append(schedule)
            low = limit
        elif schedule is None:
            low = limit
        else:
            high = limit
    if fitting:
        return min(fitting, key=lambda schedule: (schedule.time, schedule.peak))
    return min(found, key=lambda schedule: (schedule.peak, schedule.time))


def _schedule(measured: Measured, operations: tuple[Operation, ...]) -> ChainSchedule:
    chain = measured.chain
    return ChainSchedule(operations, measured.peak(operations), chain.time(operations), chain.base)
