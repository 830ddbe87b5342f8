"""Hypothesis strategies, drawn where it is tight."""

from __future__ import annotations

from hypothesis import strategies as st

from rekindle.trace import Trace, keep_all_peak, largest_need, random_dag


@st.composite
def traces(draw: st.DrawFn, *, longest: int = 24) -> Trace:
    rng = draw(st.randoms(use_true_random=False))
    return random_dag(draw(st.integers(1, longest)), rng, sources=draw(st.integers(0, 2)))


@st.composite
def problems(draw: st.DrawFn, *, longest: int = 24) -> tuple[Trace, int]:
    """A trace, and a budget between the largest operator's need and keep-everything."""
    trace = draw(traces(longest=longest))
    low, high = largest_need(trace), keep_all_peak(trace)
    return trace, draw(st.integers(min(low, high), high))
