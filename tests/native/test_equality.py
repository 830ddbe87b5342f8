"""Tests that the native engine (C++) takes the same actions as the Python engine, one by one.

Memory and clock are equal after each action. All invariants hold after each event, such as an
operator call.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle import native
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import DTR, LRU, MSPS, Ablation, Largest, Policy, Swap, Thrifty
from rekindle.schedule import Discard, SwapOut
from rekindle.simulator import Run
from rekindle.simulator._native import PASSED, play
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak, largest_need
from tests.dags import random_dag
from tests.native.streams import EVENTS, SWAPPING, Stream, reported, some_swap
from tests.strategies import examples

MODULE = native.engine()
pytestmark = pytest.mark.skipif(MODULE is None, reason=native.why_not(native.ENGINE))

STEPS, CHECK, FORGIVE = 1, 2, 4
POLICIES = [
    Thrifty(),
    DTR(),
    DTR("local"),
    LRU(),
    Largest(),
    MSPS(),
    Ablation(staleness=False, size=False, cost="exact"),
    Ablation(staleness=True, size=False, cost="none"),
]


def _replayed(trace: Trace, budget: int, policy: Policy, core: str, limit: int | None = None):
    """Return the outcome, the totals and the record of a simulated run."""
    run = Run(trace, budget, policy, limit, core=core)
    try:
        run.go()
        ending: tuple[object, ...] = ("passed",)
    except NoRoom as shortage:
        ending = (shortage.needed, shortage.memory, shortage.budget, shortage.call.id)
    except Thrashed as thrashed:
        ending = (str(thrashed),)
    totals = [getattr(run.engine, name) for name in ("memory", "peak", "clock")]
    return ending, totals, run.record()


def _loop(steps: int, costs: random.Random) -> Trace:
    """Return the trace of `x = normalize(c @ x)`, repeated, and of its backward pass.

    Within a small budget, a recomputation needs long chains of evicted values. The norm of each
    `x` has only a few bytes, so many norms stay in memory, and each choice has many candidates.
    """
    builder = TraceBuilder("loop")
    matrix, x = (builder.source(64, held=True) for _ in range(2))
    saved = []
    for _ in range(steps):
        (product,) = builder.call("mm", costs.randint(50, 70), [matrix, x], [64])
        (norm,) = builder.call("norm", costs.randint(15, 25), [product], [1])
        saved.append((x, product, norm))
        (x,) = builder.call("div", costs.randint(10, 20), [product, norm], [64])
    (gradient,) = builder.call("norm_backward", 20, [x], [64])
    builder.release(x)
    for number, (x, product, norm) in reversed([*enumerate(saved)]):
        (inner,) = builder.call("div_backward", 30, [gradient, product, norm], [64])
        for value in (gradient, product, norm):
            builder.release(value)
        builder.release(*builder.call("mm_backward", 60, [inner, x], [64]))
        (gradient,) = builder.call("mm_backward", 60, [inner, matrix], [64])
        builder.release(inner)
        if number:
            builder.release(x)
    return builder.build()


def _shared_chain(length: int, rng: random.Random) -> Trace:
    """Return the trace of a chain of large values. A small value is computed from each of them.

    The large values are evicted first. They are then ancestors of all values in memory.
    """
    builder = TraceBuilder("shared chain")
    x = builder.source(64, held=True)
    large, small = [], []
    for _ in range(length):
        (x,) = builder.call("next", rng.randint(20, 30), [x], [640])
        (y,) = builder.call("reduce", 10, [x], [64])
        large.append(x)
        small.append(y)
    for number in rng.sample(range(length), length):
        (z,) = builder.call("read", 10, [small[number]], [64])
        builder.release(z)
    for value in (*large, *small):
        builder.release(value)
    return builder.build()


@pytest.mark.parametrize(
    "policy",
    [Thrifty(), DTR(), MSPS(), Ablation(staleness=True, size=False, cost="exact")],
    ids=repr,
)
@pytest.mark.parametrize("states", [5, 12, 30])
def test_native_and_python_engine_act_equally_on_long_loop(policy: Policy, states: int) -> None:
    trace = _loop(90, random.Random(states))
    records = [_replayed(trace, 64 * (states + 8), policy, core) for core in ("python", "native")]
    assert records[0] == records[1]
    assert records[0][0] == ("passed",)
    assert records[0][1][2] > trace.compute_ns  # the run recomputed at least one value


@pytest.mark.parametrize("budget", [64 * 80, 64 * 110])
def test_native_and_python_engine_agree_with_shared_ancestors(budget: int) -> None:
    trace = _shared_chain(100, random.Random(0))
    records = [_replayed(trace, budget, Thrifty(), core) for core in ("python", "native")]
    assert records[0] == records[1]
    assert records[0][0] == ("passed",)
    assert records[0][1][2] > trace.compute_ns


@given(seed=st.integers(0, 2**32), policy=st.sampled_from(POLICIES), share=st.floats(0, 1))
@examples(40)
def test_native_and_python_engine_act_equally_on_random_program(
    seed: int, policy: Policy, share: float
) -> None:
    rng = random.Random(seed)
    trace = random_dag(rng.randint(1, 60), rng, sources=rng.randint(0, 2))
    low, high = sorted((largest_need(trace), keep_all_peak(trace)))
    budget = low + int(share * (high - low))
    in_python, in_cpp = (
        _replayed(trace, budget, policy, core, limit=300) for core in ("python", "native")
    )
    assert in_cpp == in_python


@pytest.mark.parametrize("policy", [Thrifty(), DTR(), LRU()], ids=repr)
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_recomputing_thousands_of_operators_keeps_stack_small(policy: Policy, share: float) -> None:
    trace = chain(1500, nbytes=7, cost=3)
    budget = int(7 * 1500 * share)
    limit = 1500 * 10
    runs = [_replayed(trace, budget, policy, core, limit) for core in ("native", "python")]
    assert runs[0] == runs[1]


def _compare(
    seed: int,
    length: int,
    budget: int | None,
    policy: Policy,
    swap: Swap | None = None,
) -> Stream:
    stream = Stream(random.Random(seed), budget, policy, swap)
    stream.draw(length)
    assert MODULE is not None
    watch = CHECK | FORGIVE
    played = play(MODULE, stream.words, budget=budget, policy=policy, swap=swap, watch=watch)
    assert played is not None
    assert (played.status, played.numbers[4]) == (PASSED, ""), played.numbers
    assert [*played.steps()] == stream.steps
    assert [*played.clock()] == stream.clock
    assert [*played.memory()] == stream.memory
    assert reported(played.actions()) == reported(stream.actions)
    return stream


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 200), budget=st.integers(4, 40))
@examples(25)
def test_native_and_python_engine_act_equally_on_random_events(
    policy: Policy, seed: int, length: int, budget: int
) -> None:
    _compare(seed, length, budget, policy)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 200), budget=st.integers(4, 40))
@example(seed=84, length=141, budget=4)  # a plan copies a value whose copy was refused before
@example(seed=250, length=150, budget=38)  # a value on the host loses its recipe
@examples(25)
def test_native_and_python_engine_with_swap_act_equally(
    policy: Policy, seed: int, length: int, budget: int
) -> None:
    _compare(seed, length, budget, policy, some_swap(random.Random(seed)))


def test_random_event_streams_with_swap_contain_each_action() -> None:
    seen, done, failed, again = set[str](), set[str](), 0, 0
    for seed in range(60):
        swap = some_swap(random.Random(seed))
        stream = Stream(random.Random(seed), 20, Thrifty(), swap)
        stream.draw(200)
        seen |= stream.seen
        done |= {repr(type(action)) + str(getattr(action, "keep", "")) for action in stream.actions}
        failed += stream.failures
        again += sum(
            isinstance(one, Discard) and next_one == SwapOut(one.storage)
            for one, next_one in pairwise(stream.actions)
        )
    assert seen == {*SWAPPING}
    assert len(done) == 6  # `Compute`, `Free`, `SwapOut` of both kinds, `SwapIn`, `Discard`
    assert failed > 5
    assert again > 5  # copies that were outdated


def test_random_event_streams_contain_each_kind_of_event() -> None:
    seen, short, again = set[int](), 0, 0
    for seed in range(40):
        stream = Stream(random.Random(seed), 25, Thrifty())
        stream.draw(200)
        seen |= stream.seen
        short += sum(step < 0 for step in stream.steps[::3])
        again += stream.engine.recompute_ns
    assert seen == {*EVENTS}
    assert short > 100
    assert again > 1000
