"""Hypothesis strategies, drawn where it is tight."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from rekindle.trace import Trace, keep_all_peak, largest_need, random_dag


@st.composite
def traces(draw: st.DrawFn, *, longest: int = 24) -> Trace:
    """Of half of them some operators have a workspace."""
    rng = draw(st.randoms(use_true_random=False))
    trace = random_dag(draw(st.integers(1, longest)), rng, sources=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        return trace
    ops = (
        replace(op, workspace=rng.choice((0, 0, 1, 3, 8)) if trace.new_storages(op) else 0)
        for op in trace.ops
    )
    return replace(trace, ops=tuple(ops))


@st.composite
def problems(draw: st.DrawFn, *, longest: int = 24) -> tuple[Trace, int]:
    """A trace, and a budget between the largest operator's need and keep-everything."""
    trace = draw(traces(longest=longest))
    low, high = largest_need(trace), keep_all_peak(trace)
    return trace, draw(st.integers(min(low, high), high))
