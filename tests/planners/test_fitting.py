"""Tests of fitting: a fast search for a plan, which evicts values until a budget is met.

Fitted plans are always valid, and cost little more than the optimum.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import _planners
from rekindle._planners import Online, WarmCuts
from rekindle.planners import Cuts, Problem, Search, Status, _fitting
from rekindle.planners._base import recompute_all
from rekindle.planners._fitting import Fitter
from rekindle.planners._sequence import Timeline, prune, timeline
from rekindle.planners._writer import to_schedule
from rekindle.policies import DEFAULT, DTR, MSPS, Thrifty
from rekindle.schedule import verify
from rekindle.trace import Event, Pin, Retain, TraceBuilder, check_trace
from tests.planners.helpers import exhaustive, problem_of, small_graphs, unit_chain
from tests.strategies import examples, problems


def fitted(problem: Problem, budget: int, steps: list[int] | None = None) -> Timeline | None:
    line = timeline(problem, prune(problem, steps or list(range(len(problem)))))
    return Fitter(problem, budget, lambda: 60.0).fit(line)


def deep(blocks: int) -> Problem:
    """Return the planning problem of a residual network and its backward pass.

    Each block has three values, of which the middle one is large.
    """
    nodes: list[tuple[int, int, list[int]]] = [(1, 2, [])]
    for _ in range(blocks):
        last = len(nodes) - 1
        nodes += [(4, 4, [last]), (1, 4, [last + 1]), (4, 2, [last + 2, last])]
    gradient = len(nodes) - 1
    for block in reversed(range(blocks)):
        first = 1 + 3 * block
        nodes.append((4, 4, [gradient, first + 1]))
        nodes.append((1, 4, [len(nodes) - 1, first]))
        nodes.append((4, 2, [len(nodes) - 1, first - 1, gradient]))
        gradient = len(nodes) - 1
    return problem_of(*nodes)


def unet(levels: int) -> Problem:
    """Return the planning problem of a U-Net and its backward pass.

    The gradient of each skip connection is kept until the backward pass reaches the encoder.
    """
    nodes: list[tuple[int, int, list[int]]] = []

    def add(cost: int, nbytes: int, reads: list[int]) -> int:
        nodes.append((cost, nbytes, reads))
        return len(nodes) - 1

    x = add(1, 2**levels, [])
    down: list[tuple[int, int, int]] = []
    up: list[tuple[int, int]] = []
    sizes = [2 ** (levels - level) for level in range(levels)]
    for size in sizes:
        first = add(4, size, [x])
        down.append((x, first, add(1, size, [first])))
        x = add(1, size // 2, [down[-1][2]])
    for size, (_, _, skip) in zip(reversed(sizes), reversed(down), strict=True):
        both = add(1, 2 * size, [add(1, size, [x]), skip])
        up.append((both, add(8, size, [both])))
        x = add(1, size, [up[-1][1]])
    gradient = add(1, sizes[0], [x])
    waiting: list[int] = []
    for size, (both, first) in zip(sizes, reversed(up), strict=True):
        whole = add(8, 2 * size, [add(1, size, [gradient, first]), both])
        half = add(1, size, [whole])
        waiting.append(add(1, size, [whole]))
        gradient = add(1, size // 2, [half])
    for size, (source, first, skip) in zip(reversed(sizes), reversed(down), strict=True):
        merged = add(1, size, [add(1, size, [gradient, skip]), waiting.pop()])
        gradient = add(4, size, [add(1, size, [merged, first]), source])
    return problem_of(*nodes)


@given(small_graphs())
@examples(100)
def test_fitted_plan_fits_budget_and_costs_at_least_optimum(drawn: tuple[Problem, int]) -> None:
    problem, budget = drawn
    line = fitted(problem, budget)
    if line is None:
        return
    cost = verify(problem.trace, to_schedule(line, "fitted"), budget)
    assert cost.peak == line.peak <= budget
    best = exhaustive(problem, budget)
    assert best is not None
    assert cost.compute_ns + cost.recompute_ns == line.cost >= best


@given(problems())
@examples(100)
def test_fitted_plan_of_random_program_is_valid_within_budget(drawn) -> None:
    trace, budget = drawn
    problem = Problem.of(trace)
    line = fitted(problem, budget)
    if line is not None:
        search = Search(problem, budget, "fitted")
        search.offer(line.steps)
        assert search.conclude().peak <= budget  # `plan` runs the verifier


@given(problems())
@examples(100)
def test_fitted_plan_with_pinned_user_held_values_fits_budget(drawn) -> None:
    trace, budget = drawn
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Retain):  # these traces retain only user-held values
            events.append(Pin(event.value))
        events.append(event)
    trace = check_trace(replace(trace, events=tuple(events)))
    line = fitted(Problem.of(trace), budget)
    if line is not None:
        assert verify(trace, to_schedule(line, "fitted"), budget).peak <= budget


@given(problems(), st.sampled_from([1, 2, 4]))
@examples(100)
def test_fitting_with_many_evictions_a_round_yields_valid_plan(drawn, share: int) -> None:
    """To be fast, a round evicts one in 32 of the values that it may evict.

    In this test, it evicts a larger part of them.
    """
    trace, budget = drawn
    problem = Problem.of(trace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitting, "_ROUND", share)
        line = fitted(problem, budget)
    if line is not None:
        cost = verify(trace, to_schedule(line, "fitted"), budget)
        assert cost.peak <= budget
        # views may be recomputed at no cost
        assert cost.compute_ns + cost.recompute_ns >= line.cost


@given(small_graphs())
@examples(100)
def test_fitting_with_one_eviction_a_round_finds_plan_as_often(drawn: tuple[Problem, int]) -> None:
    problem, budget = drawn
    alone = fitted(problem, budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fitting, "_ROUND", 1)
        together = fitted(problem, budget)
    assert (alone is None) == (together is None)


@pytest.mark.slow
def test_fitting_thousands_of_values_takes_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = deep(700)
    rounds: list[int] = []
    close = _fitting._Gaps.close

    def counted(gaps: _fitting._Gaps, *, several: bool) -> tuple[list[int], Timeline] | None:
        closed = close(gaps, several=several)
        rounds.append(0 if closed is None else len(closed[0]))
        return closed

    monkeypatch.setattr(_fitting._Gaps, "close", counted)
    line = fitted(problem, (problem.floor + problem.keep_all_peak) // 2)
    assert line is not None
    assert sum(rounds) > 20 * len(rounds)
    # The budget allows half of the 10 bytes of each block. Recomputing the 4 bytes in the middle of
    # a block takes 1 us. A quarter of the blocks recompute 4 more bytes, which takes 4 us.
    assert line.cost == problem.compute_ns + (700 * 1 + 175 * 4) * 1000


# Budgets in bytes, and the optimal times in us, which `rekindle.planners.Cuts` has proven.
@pytest.mark.parametrize(
    ("budget", "optimum"), [(135, 297), (104, 305), (73, 337), (50, 360), (35, 385)]
)
def test_fitting_recomputes_residual_blocks_at_optimal_cost(budget: int, optimum: int) -> None:
    line = fitted(deep(16), budget)
    assert line is not None
    assert line.cost == optimum * 1000


def test_fitting_of_chain_finds_plan_where_policies_fail() -> None:
    problem = deep(16)
    assert (problem.floor, problem.keep_all_peak) == (12, 166)
    for budget in (16, 17):
        assert fitted(problem, budget) is not None
        for policy in (DTR(), Thrifty(), MSPS()):
            assert Online(policy).schedule(problem, budget) is None


@pytest.mark.parametrize("levels", [3, 4, 5])
def test_fitting_of_unet_finds_plan_down_to_smallest_budget(levels: int) -> None:
    problem = unet(levels)
    line = fitted(problem, problem.floor)
    assert line is not None
    assert line.cost < 1.7 * problem.compute_ns


def test_fitting_below_smallest_possible_budget_returns_none() -> None:
    problem = unit_chain(8)
    assert fitted(problem, problem.floor - 1) is None


def test_fitting_with_cost_limit_below_best_plan_returns_none() -> None:
    problem = deep(8)
    budget = (problem.floor + problem.keep_all_peak) // 2
    line = timeline(problem, range(len(problem)))
    fitter = Fitter(problem, budget, lambda: 60.0)
    found = fitter.fit(line)
    assert found is not None
    assert fitter.fit(line, most=found.cost - 1) is None


def test_smallest_budget_that_cuts_planner_suggests_has_plan() -> None:
    problem = deep(12)
    refused = Cuts(time_limit=1).plan(problem, problem.floor - 1)
    assert refused.smallest_budget is not None
    everything = timeline(problem, prune(problem, recompute_all(problem)))
    assert refused.smallest_budget <= everything.peak
    assert Cuts(time_limit=1).plan(problem, refused.smallest_budget).schedule is not None


def test_plan_that_recomputes_for_too_long_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of hundreds of times the program's time has millions of steps, and helps nobody."""
    problem = deep(12)
    budget = problem.floor + 4
    slow = WarmCuts(0.5).plan(problem, budget)
    assert slow.status is Status.FEASIBLE
    assert slow.overhead is not None
    assert slow.overhead > 1
    monkeypatch.setattr(_planners, "LONGEST", 1)
    refused = WarmCuts(0.5).plan(problem, budget)
    assert (refused.status, refused.schedule) == (Status.NOT_FOUND, None)
    assert "more than 1 times the program's own time" in refused.message
    assert refused.smallest_budget is not None
    found = WarmCuts(0.5).plan(problem, refused.smallest_budget)
    assert found.overhead is not None
    assert found.overhead <= 1


@given(problems(), st.sampled_from([1e-6, 0.2]))
@examples(25)
def test_plan_is_found_for_each_budget_in_which_a_policy_runs(drawn, seconds) -> None:
    trace, budget = drawn
    problem = Problem.of(trace)
    policies = DEFAULT, DTR(), MSPS()
    ran = [Online(each, limit=10).schedule(problem, budget) for each in policies]
    if any(ran):
        plan = WarmCuts(seconds).plan(problem, budget)
        assert plan.cost_ns is not None
        if ran[0] is not None:
            judged = verify(trace, ran[0], budget)
            assert plan.cost_ns <= judged.compute_ns + judged.recompute_ns


def test_plan_is_valid_if_operator_repeats_before_user_read() -> None:
    builder = TraceBuilder("two results")
    (source,) = builder.call("source", 1, [], [1])
    kept, passed = builder.call("both", 1, [source], [1, 1])
    builder.use(kept)  # the program reads `kept` and holds it to the end
    builder.call("next", 1, [passed], [1])
    problem = Problem.of(builder.build())
    search = Search(problem, problem.keep_all_peak, "given")
    reading = problem.op.index(None)
    search.offer([*range(reading), reading - 1, *range(reading, len(problem))])
    assert search.conclude().schedule is not None  # `plan` runs the verifier
