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


def _names_of_actions(*, held: bool) -> list[str]:
    """Return what is computed and freed if the program drops a value whose child is evicted.

    Variables of the program hold the value if `held`, else only autograd refers to it.
    """
    builder = TraceBuilder()
    (parent,) = builder.call("parent", 1, (), [4], held=held)
    (child,) = builder.call("child", 1, [parent], [4])
    builder.call("wait", 1, (), [0])
    builder.call("read", 1, [parent], [0])
    (other,) = builder.call("other", 1, (), [4])  # evicts the child
    builder.release(other)
    (builder.drop if held else builder.release)(parent)
    builder.use(child)
    trace = builder.build()
    record = replay(trace, budget=8, policy=LRU(), watch=Engine.check)
    verify(trace, record.schedule, 8)
    made = {trace.values[op.outputs[0]]: op.name for op in trace.ops}
    return [
        trace.ops[action.op].name if isinstance(action, Compute) else f"free {made[action.storage]}"
        for action in record.actions[5:]
        if isinstance(action, (Compute, Free))
    ]


def test_released_value_stays_until_evicted_child_is_recomputed() -> None:
    assert _names_of_actions(held=False) == ["other", "free other", "child", "free parent"]


def test_value_that_only_variables_held_leaves_with_them() -> None:
    assert _names_of_actions(held=True) == [
        "other", "free other", "free parent", "parent", "child", "free parent",
    ]  # fmt: skip
