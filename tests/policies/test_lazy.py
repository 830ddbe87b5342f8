"""Tests that an eviction policy chooses the same storage as a scan of all scores.

Policies do not compute all scores at each choice (they are lazy), because that would be slow.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import rekindle
from rekindle.engine import NoRoom, Thrashed
from rekindle.policies import (
    DTR,
    MSPS,
    NAMED,
    Ablation,
    Candidate,
    Chooser,
    Policy,
    Thrifty,
    _neighborhood,
)
from rekindle.policies._benefits import Benefits
from rekindle.policies._scored import ScoredChooser
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, keep_all_peak, largest_need
from tests.dags import random_dag
from tests.helpers import Link
from tests.strategies import examples, problems


class Compared(Policy):
    """A policy that compares each of its choices with the best score of all evictable storages.

    The comparison restores the policy's counters, so it does not change later choices.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.choices = 0

    def bind(self) -> Chooser:
        chooser = self.policy.bind()
        assert isinstance(chooser, ScoredChooser)
        choose = chooser.choose

        def compared(now: int) -> Candidate | None:
            chosen = choose(now)
            benefits = dict(_benefits(chooser, now))
            assert (chosen is None) == (not benefits)
            if chosen is not None:
                assert chosen is max(benefits, key=lambda s: (benefits[s], s.order))
                self.choices += 1
            return chosen

        chooser.choose = compared  # type: ignore[method-assign]
        return chooser


def _benefits(chooser: ScoredChooser, now: int) -> Iterator[tuple[Candidate, float]]:
    neighborhood, power = chooser._neighborhood, 2 if chooser._root else 1
    asked = getattr(neighborhood, "_asked", 0)
    for storage in chooser._slot:
        price = neighborhood.cost(storage) or 1e-9
        weight = storage.nbytes**power if chooser._by_size else 1.0
        moving = chooser._benefits._moving
        benefit = weight * (now - storage.last_access) / price**power
        yield storage, benefit if moving else weight / price
    if asked:
        neighborhood._asked = asked  # type: ignore[attr-defined]


LAZY = [
    DTR(),
    DTR("classes"),
    MSPS(),
    Thrifty(),
    Ablation(staleness=False, size=True, cost="exact"),
    Ablation(staleness=True, size=False, cost="classes"),
]


@pytest.mark.parametrize("policy", LAZY, ids=repr)
@given(problem=problems(longest=40))
@examples(25)
def test_policy_with_lazy_scores_chooses_like_full_scan(
    policy: Policy, problem: tuple[Trace, int]
) -> None:
    trace, budget = problem
    try:
        replay(trace, budget=budget, policy=Compared(policy))
    except NoRoom:
        assume(False)


def test_storage_read_by_locked_operator_gets_new_score() -> None:
    """A regression test: the storage kept its old score, because it stayed evictable."""
    rng = random.Random(1588)
    trace = random_dag(rng.randint(1, 30), rng, sources=rng.randint(0, 2))
    compared = Compared(DTR())
    replay(trace, budget=17, policy=compared)
    assert compared.choices > 10


def test_policy_comparison_covers_over_300_evictions() -> None:
    compared = Compared(DTR())
    for seed in range(30):
        trace = random_dag(60, random.Random(seed))
        budget = (largest_need(trace) + keep_all_peak(trace)) // 2
        try:
            replay(trace, budget=budget, policy=compared, recompute_limit=10_000)
        except (NoRoom, Thrashed):
            continue
    assert compared.choices > 300


@pytest.mark.parametrize("moving", [True, False])
@given(seed=st.integers(0, 10**6))
@examples(15)
def test_benefits_best_is_candidate_with_greatest_benefit(seed: int, moving: bool) -> None:
    rng = random.Random(seed)
    lines = Benefits(moving=moving)
    known: dict[int, list[int]] = {}  # slot: bytes, cost, last, order
    now = order = 0

    def add() -> None:
        nonlocal order
        order += 1
        line = [rng.randint(1, 99), rng.randint(1, 99), now, order]
        slot = lines.add(line[1])
        lines.renew(slot, line[0], now, order)
        known[slot] = line

    while len(known) < 2 * 1024 + 7:
        add()
        now += rng.random() < 0.1
    for _ in range(60):
        now += rng.choice([0, 0, 1, 5, 200])
        slot = rng.choice(list(known))
        match rng.randrange(4):
            case 0:
                del known[slot]
                lines.remove(slot)
            case 1:
                known[slot][1] = rng.randint(1, 99)
                lines.reprice(slot, known[slot][1])
            case 2:
                order += 1
                known[slot][2:] = now, order
                lines.renew(slot, known[slot][0], now, order)
            case _:
                add()
        while rng.random() < 0.7:
            best = max(known, key=lambda s: (_value(known[s], now, moving), known[s][3]))
            assert lines.best(now) == best
            known[best][1] += rng.randint(0, 9)
            lines.reprice(best, known[best][1])


def _value(line: list[int], now: int, moving: bool) -> float:
    nbytes, cost, last, _ = line
    return nbytes * (now - last) / cost if moving else nbytes / cost


def test_thrifty_policy_score_equals_its_formula() -> None:
    """Two values in the middle of a chain are evicted. Their costs count in the scores of others.

    They count in full for their descendants, and at most up to a cap for their ancestors.
    """

    links = [Link(10, cost, last) for cost, last in ((3, 1), (50, 2), (60, 3), (7, 4), (8, 19))]
    for upper, lower in itertools.pairwise(links):
        upper.below.append(lower)
        lower.above.append(upper)
    chooser = Thrifty().bind()
    for gone in links[1:3]:
        gone.resident = False
        chooser.evicted(gone)
    for link in (links[0], links[3], links[4]):
        chooser.add(link)
    # The squared benefits of evicting one of the three storages in memory, at time 20, are
    # 100 * 19 / (3 + min(110, 3))**2 = 52.8, 100 * 16 / (7 + 110)**2 = 0.12, and
    # 100 * 1 / 8**2 = 1.6. If the cost of descendants had no cap, the first would be 0.15.
    assert chooser.choose(20) is links[0]
    assert chooser.loss(links[0], 20) == pytest.approx((3 + min(110, 2)) / math.sqrt(19))
    assert chooser.loss(links[3], 20) == pytest.approx((7 + 110) / math.sqrt(16))
    # a staleness below one nanosecond counts as one nanosecond
    assert chooser.loss(links[4], 19) == 8


def test_thrifty_policy_limits_cost_of_ancestors() -> None:
    evicted = 2 * _neighborhood.MOST_ANCESTORS
    links = [Link(10, 3, 1) for _ in range(evicted + 1)]
    for upper, lower in itertools.pairwise(links):
        upper.below.append(lower)
        lower.above.append(upper)
    chooser = Thrifty().bind()
    for gone in links[:-1]:
        gone.resident = False
        chooser.evicted(gone)
    chooser.add(links[-1])
    limit = 3 * _neighborhood.MOST_ANCESTORS
    assert chooser.loss(links[-1], 2) == 3 + limit


def test_thrifty_policy_counts_input_that_is_read_twice_once() -> None:
    first, last = Link(10, 5, 1), Link(10, 7, 2)
    first.below += [last, last]
    last.above += [first, first]
    chooser = Thrifty().bind()
    first.resident = False
    chooser.evicted(first)
    for _ in range(20):  # costs of ancestors count at most up to the cost of all evictions so far
        other = Link(10, 5, 1)
        other.resident = False
        chooser.evicted(other)
    chooser.add(last)
    assert chooser.loss(last, 3) == 7 + 5


@given(problem=problems(longest=40))
@examples(25)
def test_policy_with_limited_ancestors_chooses_like_full_scan(
    problem: tuple[Trace, int],
) -> None:
    trace, budget = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_neighborhood, "MOST_ANCESTORS", 3)
        try:
            replay(trace, budget=budget, policy=Compared(Thrifty()))
        except NoRoom:
            assume(False)


def _loop(steps: int) -> Trace:
    """Return a trace of a loop whose backward pass reads every state."""
    builder, rng = TraceBuilder("loop"), random.Random(0)
    states = [builder.source(1)]
    for _ in range(steps):
        states += builder.call("step", rng.randint(1, 9), states[-1:], [rng.randint(1, 3)])
    gradient = states.pop()
    for state in reversed(states):
        (gradient,) = builder.call("back", 1, [gradient, state], [1])
    return builder.build()


def test_both_engines_evict_alike_in_long_loop() -> None:
    trace = _loop(2_500)
    budget = keep_all_peak(trace) // 50 + 20
    native = rekindle.simulate(trace, budget=budget, core="native")
    assert rekindle.simulate(trace, budget=budget, core="python").actions == native.actions


def test_all_named_policies_differ_in_their_settings() -> None:
    assert len(NAMED) == len({repr(policy) for policy in NAMED.values()})
