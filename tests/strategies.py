"""Hypothesis strategies for traces and problems, with budgets that are hard to meet."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rekindle.trace import Trace, keep_all_peak, largest_need
from tests.dags import random_dag

#: Examples that the profile "whole" draws; hypothesis draws as many by default.
USUAL_EXAMPLES = 100


def examples(most: int) -> settings:
    """Draw `most` examples with the profile "whole", and proportionally fewer with others.

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
    """Draw a trace, and a budget between the need of its largest operator and its plain peak."""
    trace = draw(traces(longest=longest))
    low, high = largest_need(trace), keep_all_peak(trace)
    return trace, draw(st.integers(min(low, high), high))
