"""Tests that the native engine's journal (log of events and actions) suffices to replay a run.

The Python engine replays it.
"""

from __future__ import annotations

import random

import pytest

from rekindle import native
from rekindle.engine import Engine, Follower, NoRoom, Route
from rekindle.planners import ChenGreedy, ChenSqrt, Problem, RecomputeAll
from rekindle.policies import DTR, Advised, Policy, Swap, Thrifty
from rekindle.simulator import replay
from rekindle.simulator._native import Played, encode, play
from rekindle.simulator._replay import _NoMemory, drive
from rekindle.trace import Trace, chain, keep_all_peak, largest_need
from tests.dags import random_dag
from tests.native.journals import Replay
from tests.native.streams import Stream, reported, some_swap

MODULE = native.engine()
pytestmark = pytest.mark.skipif(MODULE is None, reason=native.why_not(native.ENGINE))
FORGIVE = 4


def _played(words, budget: int, policy: Policy, **more) -> Played:
    assert MODULE is not None
    played = play(MODULE, words, budget=budget, policy=policy, **more)
    assert played is not None
    return played


@pytest.mark.parametrize("policy", [Thrifty(), DTR()], ids=repr)
def test_python_engine_replays_native_journal_of_random_events(policy: Policy) -> None:
    compared = 0
    for seed in range(60):
        stream = Stream(random.Random(seed), 20, policy)
        stream.draw(100)
        played = _played(stream.words, 20, policy, watch=FORGIVE, journal=10**5)
        compared += Replay(20, policy).compare(played.journal())
    assert compared > 2000


def test_python_engine_replays_native_journal_with_failed_copies() -> None:
    compared, copied = 0, 0
    for seed in range(60):
        swap = some_swap(random.Random(seed))
        stream = Stream(random.Random(seed), 20, Thrifty(), swap)
        stream.draw(150)
        played = _played(stream.words, 20, Thrifty(), swap=swap, watch=FORGIVE, journal=10**5)
        compared += Replay(20, Thrifty(), swap=swap).compare(played.journal())
        assert stream.engine.host is not None
        copied += stream.engine.host.swapped_in
    assert compared > 2000
    assert copied > 1000


def test_native_journal_replayed_with_other_budget_differs() -> None:
    trace = chain(30, nbytes=3, cost=2)
    played = _played(encode(trace), 30, DTR(), journal=10**5)
    words = played.journal()
    assert Replay(30, DTR()).compare(words) > 30
    with pytest.raises(AssertionError):
        Replay(27, DTR()).compare(words)


def test_full_native_journal_keeps_its_last_entries() -> None:
    trace = chain(30, nbytes=3, cost=2)
    everything = _played(encode(trace), 30, DTR(), journal=10**5).journal()
    assert _played(encode(trace), 30, DTR(), journal=7).journal() == everything[-7 * 6 :]
    assert not _played(encode(trace), 30, DTR()).journal()


def _route(trace: Trace, budget: int) -> Route | None:
    for planner in (ChenSqrt("all"), ChenGreedy("all"), RecomputeAll()):
        schedule = planner.plan(Problem.of(trace), budget).schedule
        if schedule is not None:
            return Route.of(trace, schedule)
    return None


@pytest.mark.slow
def test_native_and_python_engine_follow_plan_equally() -> None:
    """In half of the runs, the plan was made for another program."""
    followed = 0
    for seed in range(120):
        rng = random.Random(seed)
        trace = random_dag(rng.randint(5, 60), rng, sources=1)
        other = trace if seed % 2 else random_dag(len(trace.ops), random.Random(seed + 1))
        budget = (largest_need(trace) + keep_all_peak(trace)) // 2
        route = _route(other, max(budget, largest_need(other)))
        if route is None or len(route.stops) <= len(trace.ops):
            continue
        found = []
        for core in ("native", "python"):
            try:
                found.append(replay(trace, budget=budget, policy=Thrifty(), route=route, core=core))
            except Exception as error:
                found.append(repr(error))
        assert found[0] == found[1]
        followed += 1
    assert followed > 30


def _with_copies(trace: Trace, budget: int, swap: Swap) -> Route | None:
    """Return the plan that was recorded from an online run that swaps."""
    try:
        return Route.of(trace, replay(trace, budget=budget, policy=DTR(), swap=swap).schedule)
    except NoRoom:
        return None


def test_native_and_python_engine_follow_plan_of_swaps_equally() -> None:
    """In a third of the runs, the plan was made for another program."""
    followed, copied = 0, 0
    for seed in range(120):
        rng = random.Random(seed)
        trace = random_dag(rng.randint(5, 60), rng, sources=1)
        other = trace if seed % 3 else random_dag(len(trace.ops), random.Random(seed + 1))
        budget = (largest_need(trace) + keep_all_peak(trace)) // 2
        swap = some_swap(rng)
        made = Swap(None, 10**10, 10**10, only=rng.random() < 0.5)
        route = _with_copies(other, max(budget, largest_need(other)), made)
        if route is None or len(route.stops) <= len(trace.ops):
            continue
        engine = Engine(budget, Advised(Thrifty()), swap)
        actions = []
        try:
            for _, yielded in drive(trace, engine, Follower(engine, route, _NoMemory())):
                actions += yielded
                engine.idle.clear()
            engine.check()
        except NoRoom:
            pass
        played = _played(encode(trace), budget, Thrifty(), swap=swap, route=route, journal=10**5)
        assert reported(played.actions()) == reported(actions)
        again = Replay(budget, Thrifty(), advised=True, swap=swap)
        again.engine.listen()  # the journal begins after the engine started to follow the plan
        again.engine.follow_plan(True)
        assert again.compare(played.journal()) == len(actions)
        assert engine.host is not None
        followed, copied = followed + 1, copied + engine.host.swapped_in
    assert followed > 30
    assert copied > 1000
