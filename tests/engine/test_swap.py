"""Tests of the engine with swapping (copying values to the host in place of recomputing them).

A verifier checks that each schedule (list of actions) of the engine is valid.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rekindle import InvalidSchedule
from rekindle._types import OpId, StorageId
from rekindle.engine import Engine, NoRoom, Storage
from rekindle.policies import DTR, LRU, Policy, Swap
from rekindle.schedule import (
    Action,
    Compute,
    Discard,
    Free,
    Record,
    Schedule,
    SwapIn,
    SwapOut,
    verify,
)
from rekindle.simulator import replay
from rekindle.simulator._replay import drive
from rekindle.trace import Trace, TraceBuilder
from tests.helpers import ALL_POLICIES
from tests.strategies import examples, problems

BYTE_PER_NS = 1_000_000_000


@st.composite
def swaps(draw: st.DrawFn) -> Swap:
    """Draw the host memory, and bandwidths below and above the speed of recomputation."""
    rate = st.sampled_from([BYTE_PER_NS // 20, BYTE_PER_NS, 50 * BYTE_PER_NS])
    host = draw(st.none() | st.integers(0, 60))
    return Swap(host, draw(rate), draw(rate), only=draw(st.booleans()))


def _run(trace: Trace, budget: int | None, policy: Policy, swap: Swap | None) -> Record:
    try:
        return replay(trace, budget=budget, policy=policy, swap=swap, watch=Engine.check)
    except NoRoom:
        assume(False)
        raise


@pytest.mark.parametrize("policy", ALL_POLICIES, ids=repr)
@given(problem=problems(), swap=swaps())
@examples(30)
def test_engine_with_swap_stays_within_budget_and_host_limit(
    policy: Policy, problem: tuple[Trace, int], swap: Swap
) -> None:
    trace, budget = problem
    record = _run(trace, budget, policy, swap)
    cost = verify(trace, record.schedule, budget, swap=swap)
    assert (cost.compute_ns, cost.recompute_ns) == (record.compute_ns, record.recompute_ns)
    assert (cost.waiting_ns, cost.transfer_ns) == (record.waiting_ns, record.transfer_ns)
    assert (cost.peak, cost.recomputations) == (record.peak, record.recomputations)
    assert (cost.swapped_out, cost.swapped_in) == (record.swapped_out, record.swapped_in)
    assert cost.host_peak == record.host_peak
    assert record.compute_ns == trace.compute_ns


@given(problem=problems(), swap=swaps())
@examples(60)
def test_engine_with_swap_and_same_events_takes_same_actions(
    problem: tuple[Trace, int], swap: Swap
) -> None:
    trace, budget = problem
    assert _run(trace, budget, DTR(), swap) == _run(trace, budget, DTR(), swap)


@given(problem=problems())
@examples(60)
def test_policy_that_only_swaps_never_recomputes(problem: tuple[Trace, int]) -> None:
    trace, budget = problem
    record = _run(trace, budget, LRU(), Swap(only=True))
    assert record.recompute_ns == 0


@given(problem=problems())
@examples(60)
def test_swap_with_host_limit_of_zero_copies_no_bytes(
    problem: tuple[Trace, int],
) -> None:
    trace, budget = problem
    record = _run(trace, budget, DTR(), Swap(host=0))
    moved = [a for a in record.actions if isinstance(a, SwapOut | SwapIn | Discard)]
    assert all(trace.storages[action.storage] == 0 for action in moved)


def _mutated(schedule: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule with one wrong copy: omitted, doubled, discarded, or of another storage."""
    actions = list(schedule.actions)
    places = [i for i, a in enumerate(actions) if isinstance(a, SwapOut | SwapIn)]
    assume(places)
    place = rng.choice(places)
    action = actions[place]
    assert isinstance(action, SwapOut | SwapIn)
    match rng.randrange(4):
        case 0:
            del actions[place]
        case 1:
            actions.insert(place, action)
        case 2:
            if isinstance(action, SwapOut):
                actions[place] = Discard(action.storage)
            else:
                actions.insert(place, Discard(action.storage))
        case _:
            actions[place] = replace(action, storage=StorageId(action.storage + 10_000))
    return Schedule(tuple(actions))


@given(problem=problems(), swap=swaps(), rng=st.randoms(use_true_random=False))
@examples(150)
def test_verifier_refuses_schedule_with_one_wrong_copy(
    problem: tuple[Trace, int], swap: Swap, rng: random.Random
) -> None:
    """A schedule without one of its copies may be valid. Then it copies fewer bytes."""
    trace, budget = problem
    record = _run(trace, budget, LRU(), replace(swap, only=True))
    wrong = _mutated(record.schedule, rng)
    try:
        cost = verify(trace, wrong, budget, swap.host)
    except InvalidSchedule:
        return
    right = verify(trace, record.schedule, budget, swap.host)
    assert (cost.swapped_out, cost.swapped_in) < (right.swapped_out, right.swapped_in) or (
        cost.swapped_in < right.swapped_in
    )


@given(problem=problems(), swap=swaps())
@examples(60)
def test_verifier_refuses_limit_below_device_or_host_peak(
    problem: tuple[Trace, int], swap: Swap
) -> None:
    trace, budget = problem
    record = _run(trace, budget, DTR(), swap)
    verify(trace, record.schedule, record.peak, record.host_peak)
    if record.host_peak:
        with pytest.raises(InvalidSchedule, match="exceeds the host's"):
            verify(trace, record.schedule, record.peak, record.host_peak - 1)
    if record.peak:
        with pytest.raises(InvalidSchedule, match="exceeds the budget"):
            verify(trace, record.schedule, record.peak - 1, record.host_peak)


def _failing(trace: Trace, engine: Engine, rng: random.Random) -> list[Action]:
    """Replay a trace, and let some copies fail at random. Return the actions."""
    done: list[Action] = []
    for _, actions in drive(trace, engine, None):
        for source in (lambda actions=actions: actions, engine.ahead, engine.prefetch):
            for action in source():
                subject = engine.subject
                fails = isinstance(subject, Storage) and rng.random() < 0.4
                if fails and isinstance(action, SwapOut):
                    if not engine.swap_out_failed(subject):
                        done.append(Free(subject.id))
                elif fails and isinstance(action, SwapIn) and subject.replayable:
                    engine.swap_in_failed(subject)
                    done.append(Discard(subject.id))
                else:
                    done.append(action)
        engine.check()
    return done


@given(problem=problems(), swap=swaps(), rng=st.randoms(use_true_random=False))
@examples(150)
def test_engine_whose_copies_fail_yields_valid_schedule(
    problem: tuple[Trace, int], swap: Swap, rng: random.Random
) -> None:
    trace, budget = problem
    engine = Engine(budget, DTR(), swap=swap)
    try:
        done = _failing(trace, engine, rng)
    except NoRoom:
        assume(False)
        raise
    verify(trace, Schedule(tuple(done)), budget, swap.host)


def _two(*, replayable: bool = True) -> Trace:
    """Return a trace of two storages of 8 bytes, of which the first one is read at the end."""
    builder = TraceBuilder()
    (first,) = builder.call("first", 100, (), [8], replayable=replayable)
    (other,) = builder.call("other", 100, (), [8])
    builder.release(other)
    builder.use(first)
    builder.call("read", 1, [first], [])
    return builder.build()


FAST = Swap(out_bytes_per_s=8 * BYTE_PER_NS, in_bytes_per_s=8 * BYTE_PER_NS)
SLOW = Swap(out_bytes_per_s=BYTE_PER_NS // 50, in_bytes_per_s=BYTE_PER_NS // 50)


@pytest.mark.parametrize(
    ("swap", "again"), [(FAST, SwapIn(StorageId(0))), (SLOW, Compute(OpId(0)))]
)
def test_engine_chooses_cheaper_of_swap_and_recomputation(swap: Swap, again: Action) -> None:
    assert replay(_two(), budget=8, policy=DTR(), swap=swap).actions[-2] == again


def test_value_without_recipe_is_evicted_only_by_swapping_out() -> None:
    trace = _two(replayable=False)
    with pytest.raises(NoRoom):
        replay(trace, budget=8, policy=DTR())
    assert replay(trace, budget=8, policy=DTR(), swap=SLOW).swapped_in == 8
    with pytest.raises(NoRoom):
        replay(trace, budget=8, policy=DTR(), swap=replace(SLOW, host=7))


def test_second_eviction_of_value_reuses_its_host_copy() -> None:
    builder = TraceBuilder()
    (first,) = builder.call("first", 1000, (), [8])
    for number in range(2):
        builder.release(builder.call(f"large{number}", 1, (), [8])[0])
        builder.call(f"read{number}", 1, [first], [], replayable=False)
    builder.release(first)
    builder.call("end", 1, (), [0])
    record = replay(builder.build(), budget=8, policy=DTR(), swap=FAST, watch=Engine.check)
    about = [a for a in record.actions if not isinstance(a, Compute) and a.storage == 0]
    # copied to the host once, evicted twice
    assert about == [
        SwapOut(StorageId(0)),
        SwapIn(StorageId(0)),
        Free(StorageId(0)),
        SwapIn(StorageId(0)),
        Free(StorageId(0)),
        Discard(StorageId(0)),
    ]


def test_outdated_host_copy_is_made_again_at_eviction() -> None:
    builder = TraceBuilder()
    (first,) = builder.call("first", 1, (), [8], replayable=False)
    for number in range(2):
        builder.release(builder.call(f"large{number}", 1, (), [8])[0])
        builder.call(f"read{number}", 1, [first], [], replayable=False)
    engine, about = Engine(8, DTR(), FAST), []
    assert engine.host is not None
    for _, actions in drive(builder.build(), engine, None):
        for action in actions:
            if engine.subject is not None and not isinstance(action, Compute | Free):
                about.append(action)
            if isinstance(action, SwapIn) and isinstance(engine.subject, Storage):
                engine.host.outdated.add(engine.subject)
        engine.check()
    out, back, discard = (kind(StorageId(0)) for kind in (SwapOut, SwapIn, Discard))
    assert about == [out, back, discard, out, back]


def test_expensive_value_is_copied_to_host_before_its_eviction() -> None:
    builder = TraceBuilder()
    (dear,) = builder.call("dear", 1000, (), [8])
    (cheap,) = builder.call("cheap", 10, (), [8])
    builder.call("else", 10, [cheap], [], replayable=False)
    (large,) = builder.call("large", 10, (), [8])
    for value in (large, cheap):
        builder.release(value)
    builder.call("read", 1, [dear], [], replayable=False)
    builder.use(dear)
    swap = Swap(out_bytes_per_s=BYTE_PER_NS, in_bytes_per_s=BYTE_PER_NS)
    record = replay(builder.build(), budget=16, policy=LRU(), swap=swap, watch=Engine.check)
    about = [a for a in record.actions if not isinstance(a, Compute) and a.storage == 0]
    assert about[:2] == [SwapOut(StorageId(0), keep=True), Free(StorageId(0))]
    assert record.waiting_ns == 8  # for the swap-in, which begins only when memory for it is free


def test_full_host_discards_host_copies_of_resident_values() -> None:
    builder = TraceBuilder()
    (first,) = builder.call("first", 1000, (), [8])
    (second,) = builder.call("second", 1000, (), [8])
    builder.call("read", 1, [first], [])
    (third,) = builder.call("third", 1000, (), [8])
    for value in (second, third):
        builder.use(value)
        builder.drop(value)
    swap = replace(FAST, host=16)
    record = replay(builder.build(), budget=8, policy=LRU(), swap=swap, watch=Engine.check)
    assert Discard(StorageId(0)) not in record.actions  # 16 bytes of host memory are enough
    swap = replace(FAST, host=8)
    record = replay(builder.build(), budget=16, policy=LRU(), swap=swap, watch=Engine.check)
    assert record.host_peak == 8


def test_swap_bandwidth_of_zero_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="write swap=None"):
        Swap(out_bytes_per_s=0)
