"""Hypothesis strategies for traces and problems, with budgets that are hard to meet."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rekindle.trace import Trace, TraceBuilder, keep_all_peak, largest_need, random_dag

#: Hypothesis' default number of examples, which the CI profile keeps.
USUAL_EXAMPLES = 100


def examples(most: int) -> settings:
    """Draw `most` examples in CI, and proportionally fewer if the profile draws fewer.

    Use it instead of `settings(max_examples=...)`, which ignores the profile.
    """
    share = settings().max_examples / USUAL_EXAMPLES
    return settings(
        max_examples=max(1, round(most * share)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


@st.composite
def traces(draw: st.DrawFn, *, longest: int = 24) -> Trace:
    """Draw a trace; in half of the traces some operators have a workspace."""
    rng = draw(st.randoms(use_true_random=False))
    trace = random_dag(draw(st.integers(1, longest)), rng, sources=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        return trace
    ops = (
        replace(op, workspace=rng.choice((0, 0, 1, 3, 8)) if tuple(trace.new_storages(op)) else 0)
        for op in trace.ops
    )
    return replace(trace, ops=tuple(ops))


@st.composite
def problems(draw: st.DrawFn, *, longest: int = 24) -> tuple[Trace, int]:
    """Draw a trace, and a budget between the largest operator's need and the keep-all peak."""
    trace = draw(traces(longest=longest))
    low, high = largest_need(trace), keep_all_peak(trace)
    return trace, draw(st.integers(min(low, high), high))


def lstm(steps: int) -> Trace:
    """Return the trace of an LSTM cell that runs `steps` times, and of its backward pass.

    Each step reads both states of the step before, so a recomputation needs both. The unit of sizes
    is a state.
    """
    builder = TraceBuilder("lstm")

    def call(name: str, inputs: list[int], size: int = 1) -> int:
        return builder.call(name, 10 * size, inputs, [size])[0]

    weight, hidden, cell = builder.source(16, held=True), builder.source(1), builder.source(1)
    saved: list[tuple[int, ...]] = []
    for _ in range(steps):
        gates = call("mm", [weight, hidden], 4)
        enter, forget, leave = (call("sigmoid", [gates]) for _ in range(3))
        new = call("tanh", [gates])
        kept, added = call("mul", [forget, cell]), call("mul", [enter, new])
        saved.append((hidden, cell, enter, forget, leave, new))
        cell = call("add", [kept, added])
        shown = call("tanh", [cell])
        hidden = call("mul", [leave, shown])
        saved[-1] += (shown,)
        for value in (gates, kept, added):
            builder.release(value)
    d_hidden, d_cell = call("loss", [hidden]), call("zero", [cell])
    builder.release(hidden)
    builder.release(cell)
    for hidden, cell, enter, forget, leave, new, shown in reversed(saved):
        from_shown = call("tanh_backward", [d_hidden, leave, shown])
        total = call("add", [d_cell, from_shown])
        d_gates = call("gates", [total, d_hidden, cell, enter, forget, leave, new, shown], 4)
        for value in (d_cell, from_shown, d_hidden):
            builder.release(value)
        d_cell = call("mul", [total, forget])
        d_hidden = call("mm", [d_gates, weight])
        builder.release(call("mm", [d_gates, hidden]))
        for value in (total, d_gates, hidden, cell, enter, forget, leave, new, shown):
            builder.release(value)
    return builder.build()
