"""Extrapolate the trace of a large batch linearly from traces of two smaller batches.

`rekindle.max_batch(simulated=True)` uses this module.
"""

from __future__ import annotations

from dataclasses import replace

from rekindle._errors import InvalidTrace
from rekindle._types import Nanoseconds
from rekindle.trace import Trace, check_trace


def at_batch(small: tuple[int, Trace], large: tuple[int, Trace], batch: int) -> Trace:
    """Extrapolate a trace to another batch size.

    The size of every storage and the cost of every operator are assumed to grow linearly with the
    batch. This holds if the program runs the same operators for each batch size. Measured costs are
    noisy, so two rules limit them. A larger batch is never cheaper than a smaller one, and half the
    batch never takes less than half the time.

    Args:
        small: A batch size and its trace.
        large: Another batch size and its trace.
        batch: The batch size of the result.

    Raises:
        InvalidTrace: The two traces have different operators.
    """
    (first, one), (second, other) = small, large
    if _shape(one) != _shape(other):
        raise InvalidTrace(
            "same-operators",
            f"the step runs other operators at batch {first} ({len(one.ops)} operators) than at "
            f"batch {second} ({len(other.ops)} operators)",
        )

    def line(low: int, high: int) -> int:
        return max(0, low + (high - low) * (batch - first) // (second - first))

    def cost(low: Nanoseconds, high: Nanoseconds) -> Nanoseconds:
        return max(line(low, max(low, high)), low * min(batch, first) // first)

    storages = tuple(line(*sizes) for sizes in zip(one.storages, other.storages, strict=True))
    ops = tuple(
        replace(
            op,
            cost=cost(op.cost, more.cost),
            workspace=line(op.workspace, more.workspace),
        )
        for op, more in zip(one.ops, other.ops, strict=True)
    )
    return check_trace(replace(one, storages=storages, ops=ops, name=f"{one.name} at {batch}"))


def _shape(trace: Trace) -> object:
    """Return everything of a trace except sizes and costs, to compare two traces without these."""
    return trace.values, trace.events, [replace(op, cost=0, workspace=0) for op in trace.ops]
