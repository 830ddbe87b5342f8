"""Tests of traces: a faulty one is refused with the broken rule and the position of the fault.

Costs and peaks of simple traces are compared with numbers computed by hand.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given

from rekindle import InvalidTrace
from rekindle._types import OpId, StorageId, ValueId
from rekindle.trace import (
    RULES,
    Call,
    Drop,
    Op,
    Release,
    Trace,
    TraceBuilder,
    Use,
    chain,
    check_trace,
    keep_all_peak,
    largest_need,
)
from tests.dags import random_dag
from tests.strategies import examples, traces


def _small() -> Trace:
    builder = TraceBuilder()
    (x,) = builder.call("x", 1, (), [8])
    (y,) = builder.call("y", 2, [x], [4])
    builder.release(x)
    builder.release(y)
    return builder.build()


def _op(trace: Trace, index: int, **change: object) -> Trace:
    ops = list(trace.ops)
    ops[index] = dataclasses.replace(ops[index], **change)  # type: ignore[arg-type]
    return dataclasses.replace(trace, ops=tuple(ops))


FAULTS = {
    "ids-exist": lambda t: _op(t, 1, inputs=(ValueId(7),)),
    "nothing-is-negative": lambda t: _op(t, 1, cost=-1),
    "each-value-is-made-once": lambda t: _op(t, 1, outputs=(ValueId(0),)),
    "inputs-are-made-before": lambda t: _op(t, 0, inputs=(ValueId(1),)),
    "views-follow-their-root": lambda t: dataclasses.replace(
        t,
        values=(*t.values, StorageId(0)),
        ops=(*t.ops, Op("view", 1, (ValueId(1),), (ValueId(2),))),
        events=(*t.events, Call(OpId(2))),
    ),
    "overwrites-pair-output-and-input": lambda t: _op(t, 1, overwrites=((ValueId(1), ValueId(0)),)),
    "calls-in-order": lambda t: dataclasses.replace(t, events=(Call(OpId(1)), Call(OpId(0)))),
    "references-balance": lambda t: dataclasses.replace(t, events=(*t.events, Release(ValueId(0)))),
}


def test_each_trace_rule_is_tested_by_a_planted_fault() -> None:
    assert set(FAULTS) == {name for name, _ in RULES}


@pytest.mark.parametrize("rule", FAULTS)
def test_trace_with_planted_fault_is_refused_with_broken_rule(rule: str) -> None:
    with pytest.raises(InvalidTrace) as caught:
        check_trace(FAULTS[rule](_small()))
    assert caught.value.rule == rule
    assert f"[rule: {rule}]" in str(caught.value)


def test_trace_that_drops_value_it_does_not_hold_is_refused() -> None:
    trace = _small()
    with pytest.raises(InvalidTrace, match="event 4 drops value 1"):
        check_trace(dataclasses.replace(trace, events=(*trace.events, Drop(ValueId(1)))))
    check_trace(dataclasses.replace(trace, events=(*trace.events, Use(ValueId(1)))))


@given(trace=traces())
@examples(100)
def test_random_trace_is_valid(trace: Trace) -> None:
    check_trace(trace)
    inside = max(op.workspace for op in trace.ops)
    assert 0 <= keep_all_peak(trace) <= sum(trace.storages) + inside


def test_random_trace_of_same_seed_is_equal() -> None:
    first, second, other = (random_dag(30, random.Random(seed)) for seed in (4, 4, 5))
    assert first == second != other


def test_chain_trace_has_cost_and_peak_computed_by_hand() -> None:
    trace = chain(6)
    assert len(trace.ops) == 12
    assert trace.compute_ns == 12
    assert keep_all_peak(trace) == 6 + 1
    assert largest_need(trace) == 3


def test_peak_memory_of_trace_counts_overwritten_storage_once() -> None:
    builder = TraceBuilder()
    (x,) = builder.call("x", 1, (), [8])
    (y,) = builder.call("x_", 1, [x], [8], overwrites=[(0, x)])
    builder.release(x)
    builder.call("z", 1, [y], [1])
    trace = builder.build()
    assert keep_all_peak(trace) == 9
    assert largest_need(trace) == 9
