"""Tests of `Rules`, settings of the engine for comparisons with the DTR paper.

They say what happens to unreferenced storages, limit the time of recomputation, and imitate quirks
of the simulator of the paper's authors.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given

from rekindle._types import StorageId
from rekindle.engine import Engine, NoRoom, Rules, Thrashed
from rekindle.policies import DTR, LRU
from rekindle.schedule import Compute, Free, verify
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, chain
from tests.strategies import examples, problems


@pytest.mark.parametrize(
    "rules",
    [Rules("ignore"), Rules("banish"), Rules(quirks=True), Rules("banish", quirks=True)],
    ids=repr,
)
@given(problem=problems())
@examples(60)
def test_engine_with_any_release_rules_yields_valid_schedule(
    rules: Rules, problem: tuple[Trace, int]
) -> None:
    trace, budget = problem
    # the simulator of DTR's authors supports neither in-place writes nor user-held storages
    if rules.quirks:
        assume(not any(op.overwrites for op in trace.ops))
    try:
        record = replay(trace, budget=budget, policy=DTR(), rules=rules, watch=Engine.check)
    except NoRoom:
        assume(False)
        raise
    cost = verify(trace, record.schedule, budget)
    assert (cost.recompute_ns, cost.peak) == (record.recompute_ns, record.peak)


def _with_a_dead_start() -> Trace:
    """Return a trace weight -> a -> b in which `a` is unreferenced before `b` is read again."""
    builder = TraceBuilder()
    weight = builder.source(1)
    (a,) = builder.call("a", 1, [weight], [4])
    (b,) = builder.call("b", 1, [a], [4])
    builder.release(weight)
    builder.release(a)
    (c,) = builder.call("c", 1, (), [8])
    builder.release(c)
    builder.call("d", 1, [b], [1])
    return builder.build()


def test_release_rules_evict_ignore_or_banish_dead_storage() -> None:
    trace = _with_a_dead_start()
    evicted = replay(trace, budget=13, policy=LRU())
    assert evicted.actions[3] == Free(StorageId(1))  # `a` is evicted when it dies
    assert evicted.recomputations == 0
    ignored = replay(trace, budget=13, policy=LRU(), rules=Rules("ignore"))
    assert ignored.actions[3] == Free(StorageId(1))  # `a` is evicted for later values
    assert replay(trace, budget=None, policy=LRU(), rules=Rules("ignore")).evictions == 0
    banished = replay(trace, budget=None, policy=LRU(), rules=Rules("banish"))
    assert Free(StorageId(1)) in banished.actions
    assert Free(StorageId(0)) in banished.actions  # no operator needs the weight any more


def test_banished_storage_pins_values_computed_from_it() -> None:
    """A banished storage is freed for good, so values cannot be recomputed from it."""
    trace = _with_a_dead_start()
    assert replay(trace, budget=9, policy=LRU()).recomputations == 2  # `b` and its input `a`
    with pytest.raises(NoRoom):
        replay(trace, budget=11, policy=LRU(), rules=Rules("banish"))


def test_recomputation_time_above_limit_raises_thrashed() -> None:
    trace = chain(12)
    full = replay(trace, budget=5, policy=DTR()).recompute_ns
    again = replay(trace, budget=5, policy=DTR(), rules=Rules(recompute_limit=full))
    assert again.recompute_ns == full
    with pytest.raises(Thrashed, match=f"took {full} ns of at most {full - 1}"):
        replay(trace, budget=5, policy=DTR(), rules=Rules(recompute_limit=full - 1))


def test_storage_of_0_bytes_is_evicted_only_with_dtr_quirks() -> None:
    builder = TraceBuilder()
    builder.call("empty", 1, (), [0])
    builder.call("a", 1, (), [4])
    builder.call("b", 1, (), [4])
    trace = builder.build()
    assert Free(StorageId(0)) not in replay(trace, budget=4, policy=LRU()).actions
    quirks = replay(trace, budget=4, policy=LRU(), rules=Rules(quirks=True))
    assert Free(StorageId(0)) in quirks.actions


def test_unreferenced_source_is_freed_except_with_dtr_quirks() -> None:
    builder = TraceBuilder()
    weight = builder.source(4)
    builder.release(weight)
    trace = builder.build()
    assert replay(trace, budget=4, policy=LRU()).evictions == 1
    assert replay(trace, budget=4, policy=LRU(), rules=Rules(quirks=True)).evictions == 0


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
