"""Tests that `AuthorsEngine` takes the same actions as the simulator of the DTR paper's authors.

The module `authors` is that simulator. Cases include equal sizes and costs, and the negative costs
that it may compute for groups of evicted neighbors.
"""

from __future__ import annotations

import random

import pytest
from _authors import AuthorsEngine, Dead, play
from hypothesis import assume, given

from rekindle._types import StorageId, ValueId
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import DTR, LRU, Ablation, Policy
from rekindle.schedule import Action, Free, Schedule, verify
from rekindle.trace import Trace, TraceBuilder, keep_all_peak
from tests.benchmarks.authors import Authors, GaveUp
from tests.strategies import examples, problems

MIB = 2**20
SIZES = ((4 * MIB,), (1,), (4, 8), (2 * MIB, 4 * MIB, 4096, MIB), (7, 10**9, 3 * 10**8 + 1))
COSTS = ((1,), (1, 2, 3), (471, 500, 900, 3000), tuple(range(471, 10**6, 3331)))


def _program(rng: random.Random, *, length: int = 90) -> Trace:
    """Draw a program like a log of an unrolled optimization.

    It has small storages of few sizes, and views that are read long after the eviction of their
    base.
    """
    builder = TraceBuilder("unrolled")
    sizes, costs = rng.choice(SIZES), rng.choice(COSTS)
    views, several = rng.choice([0, 0.2, 0.5]), rng.choice([0, 0.3])
    constants = [builder.source(rng.choice(sizes)) for _ in range(3)]
    alive: list[ValueId] = []
    for number in range(length):
        inputs = [
            rng.choice(alive[-30 if rng.random() < 0.4 else -12 :] or constants)
            for _ in range(rng.randint(1, 3))
        ]
        if rng.random() < 0.2:
            inputs.append(rng.choice(constants))
        cost = rng.choice(costs)
        if rng.random() < views:
            base = inputs[0]
            alive += builder.call(f"view{number}", cost, inputs[:2], [0], aliases=[base])
        else:
            outputs = rng.choice([1, 1, 2, 3]) if rng.random() < several else 1
            made = [rng.choice(sizes) for _ in range(outputs)]
            alive += builder.call(f"op{number}", cost, inputs, made)
        while len(alive) > rng.randint(15, 60):
            builder.release(alive.pop(rng.randrange(len(alive))))
    for value in reversed(alive):
        (gradient,) = builder.call("grad", rng.choice(costs), [value], [rng.choice(sizes)])
        builder.release(value)
        (builder.pin if rng.random() < 0.1 else builder.release)(gradient)
    return builder.build()


def _theirs(trace: Trace, budget: int, policy: Ablation) -> tuple[bool, list[Action], int]:
    run = Authors(trace, budget, policy, limit=2 * trace.compute_ns)
    try:
        run.go()
    except GaveUp:
        return False, run.actions, run.least_total
    return True, run.actions, run.least_total


def _ours(trace: Trace, budget: int, policy: Ablation) -> tuple[bool, list[Action]]:
    engine = AuthorsEngine(budget, policy, recompute_limit=2 * trace.compute_ns)
    actions: list[Action] = []
    try:
        play(trace, engine, actions)
    except (NoRoom, Thrashed):
        return False, actions
    return True, actions


@pytest.mark.parametrize("staleness", [False, True], ids=["", "staleness"])
@pytest.mark.parametrize("size", [False, True], ids=["", "size"])
@pytest.mark.parametrize("cost", ["classes", "local", "none"])
def test_engine_with_dtr_rules_acts_like_dtr_simulator(
    cost: str, size: bool, staleness: bool
) -> None:
    if cost == "none" and not size and not staleness:
        pytest.skip("that is a random choice")
    policy = Ablation(staleness=staleness, size=size, cost=cost)  # type: ignore[arg-type]
    passed = below_nothing = 0
    for seed in range(16):
        trace = _program(random.Random(seed))
        for ratio in (0.7, 0.5):
            budget = int(keep_all_peak(trace) * ratio)
            done, theirs, least = _theirs(trace, budget, policy)
            passed += done
            below_nothing += least < 0
            went, ours = _ours(trace, budget, policy)
            assert went == done, (seed, ratio)
            # If both run out of memory, the actions for the last operator are not compared.
            same = len(ours) if done else len(theirs) - 1
            assert ours[:same] == theirs[:same], (seed, ratio)
    assert passed > 8
    assert cost != "classes" or below_nothing > 0


@pytest.mark.parametrize("dead", ["evict", "ignore", "banish"])
@given(problem=problems())
@examples(60)
def test_engine_with_dtr_rules_yields_valid_schedule(
    dead: Dead, problem: tuple[Trace, int]
) -> None:
    trace, budget = problem
    # the simulator of DTR's authors supports no in-place writes
    assume(not any(op.overwrites for op in trace.ops))
    engine = AuthorsEngine(budget, DTR(), dead)
    actions: list[Action] = []
    try:
        play(trace, engine, actions)
    except NoRoom:
        assume(False)
        raise
    cost = verify(trace, Schedule(tuple(actions)), budget)
    assert (cost.recompute_ns, cost.peak) == (engine.recompute_ns, engine.peak)


def _acted(trace: Trace, budget: int | None, policy: Policy, dead: Dead) -> list[Action]:
    actions: list[Action] = []
    play(trace, AuthorsEngine(budget, policy, dead), actions)
    return actions


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


def test_dead_storage_is_evicted_ignored_or_banished() -> None:
    trace = _with_a_dead_start()
    assert _acted(trace, 13, LRU(), "evict")[3] == Free(StorageId(1))  # when it dies
    assert _acted(trace, 13, LRU(), "ignore")[3] == Free(StorageId(1))  # for later values
    assert not any(isinstance(a, Free) for a in _acted(trace, None, LRU(), "ignore"))
    banished = _acted(trace, None, LRU(), "banish")
    assert Free(StorageId(1)) in banished
    assert Free(StorageId(0)) in banished  # no operator needs the weight any more


def test_banished_storage_pins_values_computed_from_it() -> None:
    """A banished storage is freed for good, so values cannot be recomputed from it."""
    trace = _with_a_dead_start()
    assert _acted(trace, 10, LRU(), "evict")
    with pytest.raises(NoRoom):
        _acted(trace, 10, LRU(), "banish")


def test_storage_of_0_bytes_is_evicted_and_dead_source_is_not() -> None:
    builder = TraceBuilder()
    builder.call("empty", 1, (), [0])
    weight = builder.source(4)
    builder.release(weight)
    builder.call("a", 1, (), [4])
    builder.call("b", 1, (), [4])
    freed = [a.storage for a in _acted(builder.build(), 8, LRU(), "evict") if isinstance(a, Free)]
    assert freed == [0, 2]
