"""Tests of the curve of time against budget, and of predicted traces of other batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle._errors import InvalidTrace
from rekindle.policies import DTR, LRU, Policy
from rekindle.simulator import at_batch, curve, fits, smallest_budget
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak, largest_need
from tests.strategies import examples


def at(batch: int, layers: int = 6) -> Trace:
    """A chain and its way back: weights of one size, activations that grow with the batch."""
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
def test_the_smallest_budget_is_feasible_and_just_so(policy: Policy) -> None:
    trace = at(100, layers=30)
    found = smallest_budget(trace, policy)
    assert fits(trace, found, policy) is not None
    assert largest_need(trace) <= found < keep_all_peak(trace)
    assert fits(trace, int(0.97 * found), policy) is None
    assert smallest_budget(trace, policy, above=found + 5) == found + 5


@examples(30)
@given(st.integers(1, 40), st.integers(2, 20))
def test_less_is_never_faster(layers: int, points: int) -> None:
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


def test_trace_with_endless_recomputation_does_not_fit() -> None:
    """With room for one value at a time, a long chain is possible, at a price beyond all use."""
    trace = at(1000, layers=120)
    least = largest_need(trace) + 10_000
    assert fits(trace, least, LRU()) is None


@given(st.integers(1, 200))
def test_a_batch_is_continued_in_a_straight_line(batch: int) -> None:
    scaled, real = at_batch((2, at(2)), (4, at(4)), batch), at(batch)
    assert scaled.storages == real.storages
    assert scaled.ops == real.ops
    assert scaled.events == real.events


def test_steps_that_do_different_things_have_no_line() -> None:
    with pytest.raises(InvalidTrace, match=r"batch 2 .* batch 4"):
        at_batch((2, at(2, layers=3)), (4, at(4, layers=4)), 8)
