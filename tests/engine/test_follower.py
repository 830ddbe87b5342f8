"""Tests of an engine that follows a plan (a list of evictions and recomputations made ahead).

If the plan was made for another program, the schedule of the engine must still be valid. If it was
made for this program, the run takes at most the planned time.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rekindle._planners import WarmCuts
from rekindle._types import StorageId
from rekindle.engine import Engine, NoRoom, Route
from rekindle.planners import ChenGreedy, ChenSqrt, Problem, RecomputeAll
from rekindle.policies import DEFAULT, DTR, LRU, Advised, AdvisedChooser, Policy, Swap
from rekindle.schedule import Schedule, verify
from rekindle.simulator import replay
from rekindle.trace import (
    Trace,
    TraceBuilder,
    chain,
    keep_all_peak,
    largest_need,
)
from tests.dags import random_dag
from tests.strategies import examples, problems


def _check(engine: Engine) -> None:
    engine.check()


def _planned(trace: Trace, budget: int) -> Schedule | None:
    """Return the schedule of a random planner that needs no solver."""
    problem = Problem.of(trace)
    for planner in (ChenSqrt("all"), ChenGreedy("all"), RecomputeAll()):
        plan = planner.plan(problem, budget)
        if plan.schedule is not None:
            return plan.schedule
    return None


@st.composite
def routes(draw: st.DrawFn, operators: int, storages: int) -> Route:
    """Draw a random plan with evictions, recomputations and copies of arbitrary storages."""
    moves: list[int] = []
    copies = draw(st.lists(st.integers(~storages, storages), max_size=40))
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
    for index, place in enumerate(draw(st.permutations(range(len(moves))))[: len(copies)]):
        moves[place] = len(restores) + index
    kept = draw(st.lists(numbers, max_size=3, unique=True))
    return Route(tuple(stops), tuple(moves), tuple(restores), tuple(kept), tuple(copies))


@pytest.mark.parametrize("policy", [DTR(), LRU()], ids=repr)
@given(data=st.data(), problem=problems())
@examples(50)
def test_engine_with_wrong_plan_still_yields_valid_schedule(
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
    # The random plan evicts other values than the policy, so recomputation may need more memory.
    except NoRoom:
        assume(False)
        raise
    cost = verify(trace, record.schedule, budget)
    assert cost.compute_ns == trace.compute_ns
    assert (cost.recompute_ns, cost.peak) == (record.recompute_ns, record.peak)


@given(problem=problems(), seed=st.integers(0, 99))
@examples(30)
def test_plan_of_other_program_still_yields_valid_schedule(
    problem: tuple[Trace, int], seed: int
) -> None:
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


@given(data=st.data(), problem=problems(), host=st.none() | st.integers(0, 60))
@examples(60)
def test_wrong_plan_of_swaps_still_yields_valid_schedule(
    data: st.DataObject, problem: tuple[Trace, int], host: int | None
) -> None:
    trace, budget = problem
    swap = Swap(host, 10**9, 10**9, only=data.draw(st.booleans()))
    route = data.draw(routes(len(trace.ops), len(trace.storages)))
    try:
        record = replay(trace, budget=budget, policy=DTR(), watch=_check, route=route, swap=swap)
    # the random plan evicts other values than the policy, so recomputation may need more memory
    except NoRoom:
        assume(False)
        raise
    cost = verify(trace, record.schedule, budget, swap=swap)
    assert (cost.recompute_ns, cost.waiting_ns) == (record.recompute_ns, record.waiting_ns)
    assert (cost.peak, cost.host_peak) == (record.peak, record.host_peak)


@pytest.mark.parametrize("layers", [9, 25, 60])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_followed_plan_costs_at_most_its_planned_time(layers: int, share: float) -> None:
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


def _training(layers: int) -> Trace:
    """Return the trace of a chain and its backward pass.

    Matrix products are expensive, other operators are cheap.
    """
    builder = TraceBuilder()
    value = builder.source(4 << 20)
    saved = [value]
    for layer in range(layers):
        cost = 4_000_000 if layer % 3 == 0 else 200_000
        (value,) = builder.call("op", cost, [value], [4 << 20])
        saved.append(value)
    (gradient,) = builder.call("loss", 100_000, [value], [4 << 20])
    for layer in reversed(range(layers)):
        cost = 8_000_000 if layer % 3 == 0 else 300_000
        inputs = [gradient, saved[layer], saved[layer + 1]]
        before = gradient
        (gradient,) = builder.call("backward", cost, inputs, [4 << 20], is_backward=True)
        builder.release(before)
        builder.release(saved.pop())
    return builder.build()


@pytest.mark.parametrize("rate", [10**9, 4 * 10**9, 50 * 10**9])
@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_followed_plan_with_swaps_takes_its_planned_time(rate: int, ratio: float) -> None:
    """This is less time than with the policy alone."""
    trace = _training(24)
    budget = int(ratio * keep_all_peak(trace))
    swap = Swap(None, rate, rate)
    plan = WarmCuts(2.0, gap=0.01, swap=swap).plan(Problem.of(trace), budget)
    assert plan.schedule is not None
    assert plan.recompute_ns is not None
    planned = plan.recompute_ns + plan.waiting_ns
    route = Route.of(trace, plan.schedule)
    record = replay(trace, budget=budget, policy=DEFAULT, watch=_check, route=route, swap=swap)
    alone = replay(trace, budget=budget, policy=DEFAULT)
    online = replay(trace, budget=budget, policy=DEFAULT, swap=swap)
    lost = record.recompute_ns + record.waiting_ns
    assert trace.compute_ns + lost <= 1.02 * (trace.compute_ns + planned)
    assert lost <= min(alone.recompute_ns, online.recompute_ns + online.waiting_ns)
    assert record.swapped_in > 0


def test_plan_is_equal_after_json_round_trip() -> None:
    trace = chain(12)
    schedule = RecomputeAll().plan(Problem.of(trace), keep_all_peak(trace)).schedule
    assert schedule is not None
    route = Route.of(trace, schedule)
    assert route.restores
    assert Route.from_numbers(json.loads(json.dumps(route.as_numbers()))) == route


def test_policy_with_advice_but_no_marks_acts_like_base_policy() -> None:
    trace = chain(30)
    budget = keep_all_peak(trace) // 2
    plain = replay(trace, budget=budget, policy=DTR())
    assert replay(trace, budget=budget, policy=Advised(DTR())).actions == plain.actions


class _Candidate:
    """The attributes of a storage that a policy reads."""

    def __init__(self, order: int, nbytes: int = 8) -> None:
        self.nbytes, self.cost, self.last_access, self.order = nbytes, 1, 0, order
        self.resident = True

    def parents(self) -> list[_Candidate]:
        return []

    def children(self) -> list[_Candidate]:
        return []


def test_policy_with_advice_evicts_values_marked_by_plan_first() -> None:
    chooser = Advised(LRU()).bind()
    assert isinstance(chooser, AdvisedChooser)
    first, second, third = (_Candidate(order) for order in range(3))
    for candidate in (first, second):
        chooser.add(candidate)
    third.order = -1  # locked by an operator, so it may not be evicted
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
