"""Tests of following a planned route: valid with any route, as planned with its own."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rekindle._types import StorageId
from rekindle.engine import Engine, NoRoom, Route
from rekindle.planners import ChenGreedy, ChenSqrt, Problem, RecomputeAll
from rekindle.policies import DTR, LRU, Advised, AdvisedChooser, Policy
from rekindle.schedule import Schedule, verify
from rekindle.simulator import replay
from rekindle.trace import Trace, chain, keep_all_peak, largest_need, random_dag
from tests.strategies import examples, problems


def _check(engine: Engine) -> None:
    engine.check()


def _planned(trace: Trace, budget: int) -> Schedule | None:
    """A schedule of some planner that needs no solver."""
    problem = Problem.of(trace)
    for planner in (ChenSqrt("all"), ChenGreedy("all"), RecomputeAll()):
        plan = planner.plan(problem, budget)
        if plan.schedule is not None:
            return plan.schedule
    return None


@st.composite
def routes(draw: st.DrawFn, operators: int, storages: int) -> Route:
    """Moves at random, for another program or for none."""
    moves: list[int] = []
    restores: list[tuple[StorageId, ...]] = []
    stops: list[int] = []
    numbers = st.integers(0, storages).map(StorageId)
    for _ in range(operators):
        for _ in range(draw(st.integers(0, 2))):
            if draw(st.booleans()):
                moves.append(~draw(numbers))
            else:
                moves.append(len(restores))
                restores.append(tuple(draw(st.lists(numbers, min_size=1, max_size=2))))
        stops.append(len(moves))
    stops.append(len(moves))
    kept = draw(st.lists(numbers, max_size=3, unique=True))
    return Route(tuple(stops), tuple(moves), tuple(restores), tuple(kept))


@pytest.mark.parametrize("policy", [DTR(), LRU()], ids=repr)
@given(data=st.data(), problem=problems())
@examples(50)
def test_a_wrong_route_costs_time_only(
    policy: Policy, data: st.DataObject, problem: tuple[Trace, int]
) -> None:
    trace, budget = problem
    try:
        replay(trace, budget=budget, policy=policy)
    except NoRoom:
        assume(False)
    route = data.draw(routes(len(trace.ops), len(trace.storages)))
    try:
        record = replay(trace, budget=budget, policy=policy, watch=_check, route=route)
    except NoRoom:  # its evictions may need more room to recompute than the policy's
        assume(False)
        raise
    cost = verify(trace, record.schedule, budget)
    assert cost.compute_ns == trace.compute_ns
    assert (cost.recompute_ns, cost.peak) == (record.recompute_ns, record.peak)


@given(problem=problems(), seed=st.integers(0, 99))
@examples(30)
def test_the_plan_of_another_program_costs_time_only(problem: tuple[Trace, int], seed: int) -> None:
    trace, budget = problem
    other = random_dag(len(trace.ops), random.Random(seed))
    schedule = _planned(other, largest_need(other) + (keep_all_peak(other) >> 2))
    assume(schedule is not None)
    assert schedule is not None
    route = Route.of(other, schedule)
    assume(len(route.stops) > len(trace.ops))
    try:
        replay(trace, budget=budget, policy=DTR())
    except NoRoom:
        assume(False)
    try:
        record = replay(trace, budget=budget, policy=DTR(), watch=_check, route=route)
    except NoRoom:
        assume(False)
        raise
    verify(trace, record.schedule, budget)


@pytest.mark.parametrize("layers", [9, 25, 60])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_own_plan_costs_at_most_planned_time(layers: int, share: float) -> None:
    trace = chain(layers)
    budget = max(largest_need(trace), int(share * keep_all_peak(trace)))
    plans = [planner.plan(Problem.of(trace), budget) for planner in (ChenSqrt(), RecomputeAll())]
    costs = [plan.recompute_ns for plan in plans if plan.recompute_ns is not None]
    assert costs
    for plan in plans:
        if plan.schedule is not None and plan.recompute_ns is not None:
            route = Route.of(trace, plan.schedule)
            record = replay(trace, budget=budget, policy=LRU(), watch=_check, route=route)
            assert verify(trace, record.schedule, budget).recompute_ns <= plan.recompute_ns


def test_route_read_from_json_equals_written_one() -> None:
    trace = chain(12)
    schedule = RecomputeAll().plan(Problem.of(trace), keep_all_peak(trace)).schedule
    assert schedule is not None
    route = Route.of(trace, schedule)
    assert route.restores
    assert Route.from_numbers(json.loads(json.dumps(route.as_numbers()))) == route


def test_advised_policy_without_marks_acts_as_plain_policy() -> None:
    trace = chain(30)
    budget = keep_all_peak(trace) // 2
    plain = replay(trace, budget=budget, policy=DTR())
    assert replay(trace, budget=budget, policy=Advised(DTR())).actions == plain.actions


class _Candidate:
    """The least that a policy sees."""

    def __init__(self, order: int, nbytes: int = 8) -> None:
        self.nbytes, self.cost, self.last_access, self.order = nbytes, 1, 0, order
        self.resident = True

    def parents(self) -> list[_Candidate]:
        return []

    def children(self) -> list[_Candidate]:
        return []


def test_advised_chooser_evicts_marked_candidates_first() -> None:
    chooser = Advised(LRU()).bind()
    assert isinstance(chooser, AdvisedChooser)
    first, second, third = (_Candidate(order) for order in range(3))
    for candidate in (first, second):
        chooser.add(candidate)
    third.order = -1  # locked
    chooser.mark(third)
    assert chooser.spare == 0
    chooser.mark(second)
    assert (chooser.spare, chooser.choose(5)) == (8, second)
    assert chooser.spare_beside([second]) == 0
    third.order = 3
    chooser.add(third)
    assert chooser.spare == 16
    chooser.unmark(second)
    assert (chooser.spare, chooser.choose(5)) == (8, third)
    chooser.remove(third)
    assert chooser.spare == 0
    assert chooser.choose(5) in (first, second)
    chooser.clear(6)
    chooser.add(third)
    assert chooser.spare == 0
