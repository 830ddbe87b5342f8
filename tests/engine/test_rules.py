"""Tests of what the engine does with each storage: which it evicts, frees and recomputes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given

from rekindle._types import StorageId
from rekindle.engine import Engine, NoRoom, Thrashed
from rekindle.policies import DTR, LRU
from rekindle.schedule import Compute, Free, verify
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, chain
from tests.strategies import examples, problems


@given(problem=problems())
@examples(60)
def test_engine_yields_valid_schedule(problem: tuple[Trace, int]) -> None:
    trace, budget = problem
    try:
        record = replay(trace, budget=budget, policy=DTR(), watch=Engine.check)
    except NoRoom:
        assume(False)
        raise
    cost = verify(trace, record.schedule, budget)
    assert (cost.recompute_ns, cost.peak) == (record.recompute_ns, record.peak)


def test_recomputation_time_above_limit_raises_thrashed() -> None:
    trace = chain(12)
    full = replay(trace, budget=5, policy=DTR()).recompute_ns
    again = replay(trace, budget=5, policy=DTR(), recompute_limit=full)
    assert again.recompute_ns == full
    with pytest.raises(Thrashed, match=f"took {full} ns of at most {full - 1}"):
        replay(trace, budget=5, policy=DTR(), recompute_limit=full - 1)


def test_storage_of_0_bytes_is_never_evicted() -> None:
    builder = TraceBuilder()
    builder.call("empty", 1, (), [0])
    builder.call("a", 1, (), [4])
    builder.call("b", 1, (), [4])
    assert Free(StorageId(0)) not in replay(builder.build(), budget=4, policy=LRU()).actions


def test_unreferenced_source_is_freed() -> None:
    builder = TraceBuilder()
    weight = builder.source(4)
    builder.release(weight)
    assert replay(builder.build(), budget=4, policy=LRU()).evictions == 1


def test_cost_of_storage_counts_operator_with_two_views_once() -> None:
    builder = TraceBuilder()
    (base,) = builder.call("make", 10, (), [4])
    builder.call("split", 3, [base], [0, 0], aliases=[base, base])
    engines: list[Engine] = []
    replay(builder.build(), budget=None, policy=DTR(), watch=engines.append)
    (storage,) = engines[-1].storages
    assert storage.cost == 13
    assert len(storage.makers) == 2


def test_recomputing_evicted_view_counts_as_access_to_base() -> None:
    """An operator recomputes the base. A later one recomputes its view, which reads the base."""
    builder = TraceBuilder()
    (base,) = builder.call("make", 1, (), [4])
    (view,) = builder.call("view", 1, [base], [0], aliases=[base])
    (a,) = builder.call("a", 1, (), [4])
    builder.call("b", 1, (), [4])  # evicts the base and its view
    builder.release(a)
    builder.call("read", 1, [base], [0])
    builder.call("read", 1, [view], [0])
    trace = builder.build()
    record = replay(trace, budget=8, policy=LRU(), watch=Engine.check)
    assert record.actions.count(Compute(trace.maker[view])) == 2
    verify(trace, record.schedule, 8)
