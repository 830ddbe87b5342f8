"""The journal of the native engine suffices to replay its run on the Python engine."""

from __future__ import annotations

import random

import pytest

from rekindle import native
from rekindle.engine import Route, Rules
from rekindle.planners import ChenGreedy, ChenSqrt, Problem, RecomputeAll
from rekindle.policies import DTR, Policy, Thrifty
from rekindle.simulator import replay
from rekindle.simulator._native import Played, encode, play
from rekindle.trace import Trace, chain, keep_all_peak, largest_need, random_dag
from tests.native.journals import Replay
from tests.native.streams import Stream, some_swap

MODULE = native.engine()
pytestmark = pytest.mark.skipif(MODULE is None, reason=native.why_not(native.ENGINE))
FORGIVE = 4


def _played(words, budget: int, policy: Policy, **more) -> Played:
    assert MODULE is not None
    played = play(MODULE, words, budget=budget, policy=policy, rules=Rules(), **more)
    assert played is not None
    return played


@pytest.mark.parametrize("policy", [Thrifty(), DTR()], ids=repr)
def test_a_journal_of_any_events(policy: Policy) -> None:
    compared = 0
    for seed in range(60):
        stream = Stream(random.Random(seed), 20, policy, Rules())
        stream.draw(100)
        played = _played(stream.words, 20, policy, watch=FORGIVE, journal=10**5)
        compared += Replay(20, policy).compare(played.journal())
    assert compared > 2000


def test_a_journal_of_copies_that_also_fail() -> None:
    compared, copied = 0, 0
    for seed in range(60):
        swap = some_swap(random.Random(seed))
        stream = Stream(random.Random(seed), 20, Thrifty(), Rules(), swap)
        stream.draw(150)
        played = _played(stream.words, 20, Thrifty(), swap=swap, watch=FORGIVE, journal=10**5)
        compared += Replay(20, Thrifty(), swap=swap).compare(played.journal())
        assert stream.engine.host is not None
        copied += stream.engine.host.swapped_in
    assert compared > 2000
    assert copied > 1000


def test_journal_under_other_budget_is_refused() -> None:
    trace = chain(30, nbytes=3, cost=2)
    played = _played(encode(trace), 30, DTR(), journal=10**5)
    words = played.journal()
    assert Replay(30, DTR()).compare(words) > 30
    with pytest.raises(AssertionError):
        Replay(27, DTR()).compare(words)


def test_a_journal_keeps_the_last_entries() -> None:
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
def test_a_route_is_followed_as_in_python() -> None:
    """A plan made for another program, which never fits, is followed the same way too."""
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
