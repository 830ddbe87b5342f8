"""The trace of a batch that nobody has run: two smaller ones, continued in a straight line."""

from __future__ import annotations

from dataclasses import replace

from rekindle._errors import InvalidTrace
from rekindle.trace import Trace, check_trace


def at_batch(small: tuple[int, Trace], large: tuple[int, Trace], batch: int) -> Trace:
    """The trace at `batch`, from those at two other sizes of the batch.

    Every storage and every cost is taken to grow in a straight line with the batch, which holds
    where the program does the same operators. Raises `InvalidTrace` if the two did not.
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
    """All but sizes and costs."""
    return trace.values, trace.events, [replace(op, cost=0, workspace=0) for op in trace.ops]
