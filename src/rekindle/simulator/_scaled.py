"""Extrapolate the trace of a large batch linearly from traces of two smaller batches.

`rekindle.max_batch(simulated=True)` uses this module.
"""

from __future__ import annotations

from dataclasses import replace

from rekindle._errors import InvalidTrace
from rekindle.trace import Trace, check_trace


def at_batch(small: tuple[int, Trace], large: tuple[int, Trace], batch: int) -> Trace:
    """Extrapolate a trace to another batch size.

    The size of every storage and the cost of every operator are assumed to grow linearly with the
    batch. This holds if the program runs the same operators for each batch size.

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
            f"the step does not do the same at batch {first} ({len(one.ops)} operators) and at "
            f"batch {second} ({len(other.ops)})",
        )

    def line(low: int, high: int) -> int:
        return max(0, low + (high - low) * (batch - first) // (second - first))

    storages = tuple(line(*sizes) for sizes in zip(one.storages, other.storages, strict=True))
    ops = tuple(
        replace(
            op,
            cost=line(op.cost, more.cost),
            workspace=line(op.workspace, more.workspace),
        )
        for op, more in zip(one.ops, other.ops, strict=True)
    )
    return check_trace(replace(one, storages=storages, ops=ops, name=f"{one.name} at {batch}"))


def _shape(trace: Trace) -> object:
    """Return all of a trace except sizes and costs, to check that two traces differ only there."""
    return trace.values, trace.events, [replace(op, cost=0, workspace=0) for op in trace.ops]
