"""The native engine takes the same actions as the Python engine, one by one.

Memory and clock are equal after each, and all invariants hold after each event.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rekindle import native
from rekindle.engine import NoRoom, Rules, Thrashed
from rekindle.policies import DTR, LRU, MSPS, Ablation, Largest, Policy, Swap, Thrifty
from rekindle.simulator import Run
from rekindle.simulator._native import PASSED, play
from rekindle.trace import Trace, TraceBuilder, chain, keep_all_peak, largest_need, random_dag
from tests.native.streams import EVENTS, SWAPPING, Stream, some_swap, told
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
RULES = [
    Rules(recompute_limit=300),
    Rules("ignore", 300),
    Rules("banish", 300),
    Rules("evict", 300, quirks=True),
    Rules("ignore", 300, quirks=True),
    Rules("banish", 300, quirks=True),
]


def _replayed(trace: Trace, budget: int, policy: Policy, rules: Rules, core: str):
    """Return how a simulated run ended, its totals and its record."""
    run = Run(trace, budget, policy, rules, core=core)
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
    """Return the trace of `x = normalize(c @ x)`, again and again, and of its backward pass.

    In a small budget long chains of evicted values lie below what is recomputed. The norm of each
    state is a candidate of a few bytes, so the candidates are many.
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


@pytest.mark.parametrize(
    "policy",
    [Thrifty(), DTR(), MSPS(), Ablation(staleness=True, size=False, cost="exact")],
    ids=repr,
)
@pytest.mark.parametrize("states", [5, 12, 30])
def test_the_same_record_of_a_long_loop(policy: Policy, states: int) -> None:
    trace = _loop(90, random.Random(states))
    records = [
        _replayed(trace, 64 * (states + 8), policy, Rules(), core) for core in ("python", "native")
    ]
    assert records[0] == records[1]
    assert records[0][0] == ("passed",)
    assert records[0][1][2] > trace.compute_ns  # something was recomputed


@pytest.mark.parametrize("rules", RULES, ids=repr)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(POLICIES), share=st.floats(0, 1))
@examples(40)
def test_the_same_record_of_a_program(
    rules: Rules, seed: int, policy: Policy, share: float
) -> None:
    rng = random.Random(seed)
    trace = random_dag(rng.randint(1, 60), rng, sources=rng.randint(0, 2))
    low, high = sorted((largest_need(trace), keep_all_peak(trace)))
    budget = low + int(share * (high - low))
    try:
        in_python = _replayed(trace, budget, policy, rules, "python")
    except KeyError:  # the authors' simulator never ran such programs, so its quirks fail
        assume(not rules.quirks)
        raise
    assert _replayed(trace, budget, policy, rules, "native") == in_python


@pytest.mark.parametrize("rules", [Rules(), Rules("banish"), Rules(quirks=True)], ids=repr)
@pytest.mark.parametrize("policy", [Thrifty(), DTR(), LRU()], ids=repr)
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_deep_chain(policy: Policy, rules: Rules, share: float) -> None:
    """Recomputation that is thousands of operators deep must not overflow the stack."""
    trace = chain(1500, nbytes=7, cost=3)
    budget = int(7 * 1500 * share)
    rules = Rules(rules.dead, 1500 * 10, rules.quirks)
    runs = [_replayed(trace, budget, policy, rules, core) for core in ("native", "python")]
    assert runs[0] == runs[1]


def _compare(
    seed: int,
    length: int,
    budget: int | None,
    policy: Policy,
    rules: Rules,
    swap: Swap | None = None,
) -> Stream:
    stream = Stream(random.Random(seed), budget, policy, rules, swap)
    stream.draw(length)
    assert MODULE is not None
    watch = CHECK | FORGIVE
    played = play(
        MODULE, stream.words, budget=budget, policy=policy, rules=rules, swap=swap, watch=watch
    )
    assert played is not None
    assert (played.status, played.numbers[4]) == (PASSED, ""), played.numbers
    assert [*played.steps()] == stream.steps
    assert [*played.clock()] == stream.clock
    assert [*played.memory()] == stream.memory
    assert told(played.actions()) == told(stream.actions)
    return stream


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 200), budget=st.integers(4, 40))
@examples(25)
def test_the_same_answer_to_any_event(policy: Policy, seed: int, length: int, budget: int) -> None:
    _compare(seed, length, budget, policy, Rules())


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 200), budget=st.integers(4, 40))
@examples(25)
def test_the_same_answer_to_any_event_where_values_are_swapped(
    policy: Policy, seed: int, length: int, budget: int
) -> None:
    _compare(seed, length, budget, policy, Rules(), some_swap(random.Random(seed)))


def test_the_streams_that_swap_have_all_events_and_actions() -> None:
    seen, done, failed = set[str](), set[str](), 0
    for seed in range(60):
        swap = some_swap(random.Random(seed))
        stream = Stream(random.Random(seed), 20, Thrifty(), Rules(), swap)
        stream.draw(200)
        seen |= stream.seen
        done |= {repr(type(action)) + str(getattr(action, "keep", "")) for action in stream.actions}
        failed += stream.fail_in == 0
    assert seen == {*SWAPPING}
    assert len(done) == 6  # `Compute`, `Free`, `SwapOut` of both kinds, `SwapIn`, `Discard`
    assert failed > 5


def test_the_streams_have_all_events_and_little_room() -> None:
    seen, short, again = set[int](), 0, 0
    for seed in range(40):
        stream = Stream(random.Random(seed), 25, Thrifty(), Rules())
        stream.draw(200)
        seen |= stream.seen
        short += sum(step < 0 for step in stream.steps[::3])
        again += stream.engine.recompute_ns
    assert seen == {*EVENTS}
    assert short > 100
    assert again > 1000
