"""Tests of the simulated curve of time against budget, and of traces for other batch sizes.

Such a trace is extrapolated from the traces of two batch sizes.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import InvalidTrace
from rekindle.policies import DTR, LRU, Policy
from rekindle.simulator import at_batch, curve, fits, smallest_budget
from rekindle.simulator._curve import _with_other_times
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak, largest_need
from tests.strategies import examples


def at(batch: int, layers: int = 6) -> Trace:
    """Return the trace of a chain and its backward pass; activations grow with the batch."""
    builder = TraceBuilder("step")
    weight = builder.source(1000)
    values = [builder.source(10 * batch)]
    for _ in range(layers):
        values += builder.call("layer", 100 + 7 * batch, [values[-1], weight], [10 * batch])
    for value in reversed(values[1:]):
        builder.call("back", 100, [value], [8], replayable=False)
        builder.release(value)
    return builder.build()


@pytest.mark.parametrize("policy", [DTR(), LRU()], ids=repr)
def test_trace_fits_smallest_budget_but_not_3_percent_less(policy: Policy) -> None:
    trace = at(100, layers=30)
    found = smallest_budget(trace, policy)
    assert fits(trace, found, policy) is not None
    assert largest_need(trace) <= found < keep_all_peak(trace)
    assert fits(trace, int(0.97 * found), policy) is None
    assert smallest_budget(trace, policy, above=found + 5) == found + 5


def test_smallest_budget_for_other_times_suffices_for_each() -> None:
    trace = chain(40, nbytes=100, cost=1000)
    found = smallest_budget(trace, DTR(), other_times=20)
    assert found > smallest_budget(trace, DTR())
    for seed in range(20):
        assert fits(_with_other_times(trace, seed), found, DTR()) is not None


@examples(30)
@given(st.integers(1, 40), st.integers(2, 20))
def test_curve_shows_no_less_time_for_smaller_budget(layers: int, points: int) -> None:
    trace = chain(layers, nbytes=100, cost=1000)
    found = curve(trace, DTR(), points=points)
    assert found[0].budget == keep_all_peak(trace)
    assert found[0].recompute_ns == 0
    budgets = [point.budget for point in found]
    assert budgets == sorted({*budgets}, reverse=True)
    times = [point.recompute_ns for point in found]
    assert times == sorted(times)
    for point in found:
        record = fits(trace, point.budget, DTR())
        assert record is not None
        assert record.recompute_ns <= point.recompute_ns


def test_trace_that_recomputes_too_long_does_not_fit_budget() -> None:
    """`fits` returns None if a run would recompute for too long, although its memory suffices.

    The budget holds the largest operator and little more, so every value of the chain is recomputed
    many times.
    """
    trace = at(1000, layers=120)
    least = largest_need(trace) + 10_000
    assert fits(trace, least, LRU()) is None


@given(st.integers(1, 200))
def test_trace_is_extrapolated_linearly_to_other_batch(batch: int) -> None:
    scaled, real = at_batch((2, at(2)), (4, at(4)), batch), at(batch)
    assert scaled.storages == real.storages
    assert scaled.ops == real.ops
    assert scaled.events == real.events


@pytest.mark.parametrize(
    ("of_two", "of_four", "of_one", "of_eight"),
    [(100, 150, 75, 250), (100, 400, 50, 1000), (100, 60, 100, 100), (0, 60, 0, 180)],
)
def test_extrapolated_cost_of_operator_stays_between_sane_bounds(
    of_two: int, of_four: int, of_one: int, of_eight: int
) -> None:
    two, four = (2, chain(3, cost=of_two)), (4, chain(3, cost=of_four))
    for batch, cost in ((1, of_one), (2, of_two), (8, of_eight)):
        assert {op.cost for op in at_batch(two, four, batch).ops} == {cost}


def test_traces_of_different_steps_are_not_extrapolated() -> None:
    with pytest.raises(InvalidTrace, match=r"batch 2 .* batch 4"):
        at_batch((2, at(2, layers=3)), (4, at(4, layers=4)), 8)
