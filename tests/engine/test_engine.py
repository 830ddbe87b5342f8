"""Tests of the engine, which decides what is evicted and recomputed, within tight budgets.

A verifier checks that each schedule (list of actions) of the engine is valid.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rekindle._types import OpId, StorageId
from rekindle.engine import Call, Engine, NoRoom, Storage, Value
from rekindle.policies import DTR, LRU, Chooser, Policy
from rekindle.schedule import Compute, Free, verify
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak
from tests.helpers import ALL_POLICIES
from tests.strategies import examples, problems, traces


def _check(engine: Engine) -> None:
    engine.check()


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=repr)
@given(problem=problems())
@examples(60)
def test_engine_replay_is_valid_schedule_within_budget(
    policy: Policy, problem: tuple[Trace, int]
) -> None:
    trace, budget = problem
    try:
        record = replay(trace, budget=budget, policy=policy, watch=_check)
    except NoRoom:
        assume(False)
        raise
    cost = verify(trace, record.schedule, budget)
    assert (cost.compute_ns, cost.recompute_ns) == (record.compute_ns, record.recompute_ns)
    assert (cost.peak, cost.recomputations) == (record.peak, record.recomputations)
    assert record.compute_ns == trace.compute_ns


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=repr)
@given(trace=traces())
@examples(40)
def test_budget_equal_to_peak_recomputes_nothing(policy: Policy, trace: Trace) -> None:
    room = replay(trace, budget=None, policy=policy).peak
    record = replay(trace, budget=room, policy=policy, watch=_check)
    assert record.recomputations == 0
    assert record.peak == room >= keep_all_peak(trace)


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=repr)
@given(problem=problems())
@examples(25)
def test_engine_with_same_events_takes_same_actions(
    policy: Policy, problem: tuple[Trace, int]
) -> None:
    trace, budget = problem
    try:
        first = replay(trace, budget=budget, policy=policy)
    except NoRoom:
        assume(False)
        raise
    assert replay(trace, budget=budget, policy=policy) == first


@given(problem=problems(), data=st.data())
@examples(60)
def test_schedule_is_valid_at_its_peak_but_not_one_byte_less(
    problem: tuple[Trace, int], data: st.DataObject
) -> None:
    trace, budget = problem
    try:
        record = replay(trace, budget=budget, policy=DTR())
    except NoRoom:
        assume(False)
        raise
    verify(trace, record.schedule, record.peak)
    if record.peak:
        with pytest.raises(ValueError, match="exceeds the budget"):
            verify(trace, record.schedule, record.peak - 1)


def test_chain_of_12_operators_fits_into_memory_of_5_values() -> None:
    trace = chain(12)
    record = replay(trace, budget=5, policy=DTR(), watch=_check)
    assert record.peak == 5
    assert record.recomputations > 0
    verify(trace, record.schedule, 5)


def test_recomputing_one_of_two_outputs_needs_memory_for_both() -> None:
    builder = TraceBuilder()
    kept, evicted = builder.call("pair", 1, (), [4, 4])
    builder.call("use", 1, [kept], [0])
    builder.pin(kept)
    (large,) = builder.call("large", 1, (), [6])
    builder.release(large)
    builder.use(evicted)
    trace = builder.build()
    actions = replay(trace, budget=12, policy=LRU(), watch=_check).actions
    assert actions[-2:] == (Free(trace.values[large]), Compute(trace.maker[evicted]))
    # The operator needs 8 bytes for its two outputs, in addition to 4 bytes that are pinned. The
    # program frees one of the outputs later, but that does not help.
    with pytest.raises(NoRoom) as caught:
        replay(trace, budget=11, policy=LRU())
    assert caught.value.needed == 8


def test_chain_of_in_place_writes_is_recomputed_on_one_copy() -> None:
    # Dropout on a CPU makes its mask by these three operators. Only the final mask is read.
    builder = TraceBuilder()
    (empty,) = builder.call("empty_like", 1, (), [8])
    (drawn,) = builder.call("bernoulli_", 1, [empty], [8], overwrites=[(0, empty)])
    builder.release(empty)
    (mask,) = builder.call("div_", 1, [drawn], [8], overwrites=[(0, drawn)])
    builder.release(drawn)
    (other,) = builder.call("other", 1, (), [8])
    builder.release(other)
    builder.use(mask)
    trace = builder.build()
    record = replay(trace, budget=8, policy=DTR(), watch=_check)
    again = [action for action in record.actions if isinstance(action, Compute)][-3:]
    assert [(trace.ops[action.op].name, action.in_place) for action in again] == [
        ("empty_like", False),
        ("bernoulli_", True),
        ("div_", True),
    ]
    assert record.peak == 8


def test_old_value_of_in_place_write_is_recomputed_separately() -> None:
    builder = TraceBuilder()
    (old,) = builder.call("make", 1, (), [8])
    # no `release(old)`: the program keeps a reference to `old`
    (new,) = builder.call("add_", 1, [old], [8], overwrites=[(0, old)])
    (other,) = builder.call("other", 1, (), [8])
    builder.release(other)
    builder.use(new)
    builder.use(old)
    record = replay(builder.build(), budget=16, policy=DTR(), watch=_check)
    assert [a.in_place for a in record.actions if isinstance(a, Compute) and a.op == 1] == [True]


def test_overwriting_source_first_recomputes_values_made_from_it() -> None:
    builder = TraceBuilder()
    weight = builder.source(4, held=True)
    (early,) = builder.call("mm", 1, [weight], [4])
    (late,) = builder.call("mm", 1, [weight], [4])
    builder.call("other", 1, (), [4])
    builder.release(builder.call("more", 1, (), [4])[0])
    builder.call("step", 1, [weight], [4], overwrites=[(0, weight)], replayable=False, held=True)
    builder.use(early)
    builder.use(late)
    trace = builder.build()
    record = replay(trace, budget=16, policy=LRU(), watch=_check)
    verify(trace, record.schedule, 16)
    step = record.actions.index(Compute(trace.maker[-1], in_place=True))
    assert Compute(trace.maker[early]) in record.actions[:step][3:]


def test_engine_locks_no_storage_after_operator_does_not_fit() -> None:
    builder = TraceBuilder()
    a, b = (builder.call("make", 1, (), [4])[0] for _ in range(2))
    builder.call("join", 1, [a, b], [8])
    engine_seen: list[Engine] = []
    with pytest.raises(NoRoom) as caught:
        replay(builder.build(), budget=12, policy=DTR(), watch=engine_seen.append)
    assert (caught.value.needed, caught.value.budget) == (8, 12)
    engine_seen[-1].check()


def test_user_held_storage_is_evicted_only_after_release() -> None:
    builder = TraceBuilder()
    (mine,) = builder.call("make", 1, (), [8], held=True)
    builder.retain(mine)
    builder.call("other", 1, (), [8])
    with pytest.raises(NoRoom):
        replay(builder.build(), budget=8, policy=DTR())
    builder = TraceBuilder()
    (mine,) = builder.call("make", 1, (), [8], held=True)
    builder.retain(mine)
    builder.drop(mine)
    builder.call("other", 1, (), [8])
    record = replay(builder.build(), budget=8, policy=DTR(), watch=_check)
    assert Free(StorageId(0)) in record.actions


def test_storages_marked_last_resort_are_evicted_last() -> None:
    engine = Engine(16, LRU())

    def made(number: int) -> Storage:
        call = Call(OpId(number), "make", 1, ())
        value = call.makes(StorageId(number), 4)
        for _ in engine.call(call, held=True):
            pass
        return value.storage

    stores = [made(number) for number in range(4)]
    for number, storage in enumerate(stores):
        engine.set_evictable_while_held(storage, True, last=number < 2)
    for room, there in [(4, {0, 1, 3}), (8, {0, 1}), (12, {1})]:
        for _ in engine.make_room(room):
            pass
        engine.check()
        assert {storage.id for storage in stores if storage.resident} == there
    assert engine.reserve == {}
    engine.set_evictable_while_held(stores[1], True, last=True)
    for storage in stores:
        for _ in engine.drop(storage):
            pass
    engine.check()
    assert (engine.memory, engine.reserve) == (0, {})


def test_evict_of_listed_storages_skips_pinned_storages() -> None:
    engine = Engine(None, LRU())
    values: list[Value] = []
    for number in range(4):
        call = Call(OpId(number), "make", 1, values[-1:])
        values.append(call.makes(StorageId(number), 4))
        list(engine.call(call))
    stores = [value.storage for value in values]
    list(engine.pin(values[3]))
    assert [engine.loss(storage) is None for storage in stores] == [False, False, False, True]
    freed = list(engine.evict([stores[2], stores[3], stores[0]]))
    engine.check()
    assert freed == [Free(StorageId(2)), Free(StorageId(0))]
    assert engine.loss(stores[0]) is None
    assert (engine.memory, engine.peak) == (8, 16)
    assert list(engine.evict(stores[:1])) == []
    assert list(engine.use(values[2])) == [Compute(OpId(2))]


class Eager(Policy):
    """A policy that observes storages from the start, and not only from the first eviction on."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def bind(self) -> Chooser:
        chooser = self._policy.bind()
        chooser.remembers = True
        return chooser


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=repr)
@given(problem=problems())
@examples(40)
def test_policy_activated_late_chooses_as_if_active_from_start(
    policy: Policy, problem: tuple[Trace, int]
) -> None:
    """Until memory is short, the policy does not run. Then it gets all storages in order of age."""
    trace, budget = problem
    try:
        record = replay(trace, budget=budget, policy=policy, watch=_check)
    except NoRoom:
        assume(False)
        raise
    assert replay(trace, budget=budget, policy=Eager(policy)).actions == record.actions


def test_user_held_loss_keeps_no_activation_alive_after_step() -> None:
    """The recomputed activation `bent` is freed after its last use, at the end of the step.

    A recomputation of the loss would need it, but the program holds the loss itself.
    """
    builder = TraceBuilder()
    weight = builder.source(4, held=True)
    (hidden,) = builder.call("matmul", 5, [weight], [8])
    (bent,) = builder.call("tanh", 1, [hidden], [8])
    builder.call("mean", 1, [bent], [1], held=True)
    builder.release(hidden)
    (large,) = builder.call("large", 9, [weight], [24])  # does not fit unless `bent` is evicted
    builder.release(large)
    (gradient,) = builder.call("tanh_backward", 1, [bent], [1])  # recomputes `hidden` and `bent`
    builder.release(bent)
    builder.release(gradient)
    builder.call("step", 1, [weight], [4], overwrites=[(0, weight)], replayable=False, held=True)
    trace = builder.build()
    record = replay(trace, budget=36, policy=LRU())
    verify(trace, record.schedule, 36)
    assert record.recomputations == 2
    assert record.memory[-1] == 4 + 1, "the weight and the loss"
