"""Tests of operators in a trace that write their result over an input that nothing else reads."""

from __future__ import annotations

import pytest

from rekindle._types import OpId, ValueId
from rekindle.policies import LRU
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, keep_all_peak, taking_over

SIZE = 100


def backward(
    *, held: bool = False, saved: bool = False, read: bool = False, size: int = SIZE
) -> tuple[Trace, dict[OpId, ValueId]]:
    """Return a trace with a gradient and the operator that may write over the gradient."""
    builder = TraceBuilder(held=True)
    source = builder.source(SIZE)
    (gradient,) = builder.call("mm", 5, [source], [SIZE], replayable=False, is_backward=True)
    if saved:
        builder.retain(gradient)
    if read:
        builder.call("relu", 5, [gradient], [SIZE])
    (result,) = builder.call(
        "gelu_backward", 5, [gradient, source], [size], replayable=False, is_backward=True
    )
    if not held:
        builder.drop(gradient)
    builder.call("mm", 5, [result], [1], replayable=False, is_backward=True)
    trace = builder.build()
    return trace, {OpId(trace.ops.index(op)): gradient for op in trace.ops if "gelu" in op.name}


def test_traced_operator_writes_over_input_without_other_readers() -> None:
    trace, sources = backward()
    changed = taking_over(trace, sources)
    (op,) = (op for op in changed.ops if op.overwrites)
    assert op.overwrites == ((op.outputs[0], op.inputs[0]),)
    assert keep_all_peak(trace) == 3 * SIZE
    assert keep_all_peak(changed) == 2 * SIZE + 1
    assert replay(changed, budget=2 * SIZE + 1, policy=LRU()).peak == 2 * SIZE + 1


@pytest.mark.parametrize(
    "lives", [{"held": True}, {"saved": True}, {"read": True}, {"size": SIZE - 1}], ids=str
)
def test_traced_operator_does_not_write_over_input_still_needed(
    lives: dict[str, bool | int],
) -> None:
    trace, sources = backward(**lives)  # type: ignore[arg-type]
    assert taking_over(trace, sources) == trace


def test_unlisted_traced_operator_does_not_write_over_input() -> None:
    trace, _ = backward()
    assert taking_over(trace, {}) == trace
