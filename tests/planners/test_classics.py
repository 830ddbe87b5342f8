"""Tests of the classic planners: Chen's, articulation points, Revolve, Rotor, and the trivial ones.

Their plans must be valid, cost at least the optimum, and have the published costs.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from rekindle.planners import (
    ChenGreedy,
    ChenSqrt,
    Given,
    KeepAll,
    Planner,
    Problem,
    RecomputeAll,
    Revolve,
    Rotor,
    Status,
)
from rekindle.planners._line import candidates
from rekindle.planners.given import steps_of
from rekindle.policies import DTR
from rekindle.simulator import replay
from tests.planners.helpers import (
    exhaustive,
    problem_of,
    reference_problem,
    small_graphs,
    unit_chain,
)
from tests.strategies import examples, problems

ALL: tuple[Planner, ...] = (
    ChenSqrt(),
    ChenSqrt("all"),
    ChenGreedy(),
    ChenGreedy("all", tries=7),
    Revolve(),
    Revolve("all"),
    Rotor(),
    KeepAll(),
    RecomputeAll(),
)
QUIET = examples(50)


@pytest.mark.parametrize("planner", ALL, ids=lambda planner: planner.name)
@given(problems(longest=14))
@QUIET
def test_classic_plans_of_random_programs_are_valid(planner: Planner, drawn) -> None:
    trace, budget = drawn
    problem = Problem.of(trace)
    plan = planner.plan(problem, budget)  # `plan` runs the verifier
    if plan.schedule is None:
        assert plan.status in (Status.NOT_FOUND, Status.INFEASIBLE, Status.UNSUITED)
        assert plan.smallest_budget is None or plan.smallest_budget > budget or budget < plan.needed
    else:
        assert plan.peak <= budget


@given(small_graphs())
@QUIET
def test_classic_plans_cost_at_least_optimum(drawn: tuple[Problem, int]) -> None:
    problem, budget = drawn
    best = exhaustive(problem, budget)
    for planner in ALL:
        plan = planner.plan(problem, budget)
        if plan.cost_ns is not None:
            assert plan.cost_ns >= best
            assert plan.bound_ns <= best
            assert plan.status is not Status.OPTIMAL or plan.cost_ns == best


def test_keep_all_plan_at_its_own_peak_is_optimal() -> None:
    problem = reference_problem("unet_b8")
    plan = KeepAll().plan(problem, problem.keep_all_peak)
    assert (plan.status, plan.overhead, plan.peak) == (Status.OPTIMAL, 0, problem.keep_all_peak)
    less = KeepAll().plan(problem, problem.keep_all_peak - 1)
    assert (less.status, less.smallest_budget) == (Status.NOT_FOUND, problem.keep_all_peak)


def test_chen_plan_of_16_layers_keeps_every_4th_value() -> None:
    """Three of four values are recomputed once. Memory is for about 2 sqrt(n) of n values."""
    problem = unit_chain(16)
    plan = ChenSqrt().plan(problem, 10)
    assert plan.recompute_ns <= 12_000
    assert plan.peak <= 10


def test_articulation_points_exclude_node_bypassed_by_skip() -> None:
    """Articulation points lie on every path. Here f2 also reads f0, so one path bypasses f1."""
    forward = [(1, 1, []), (1, 1, [0]), (1, 1, [0, 1]), (1, 1, [2])]
    backward = [(1, 1, [2, 3]), (1, 1, [1, 4]), (1, 1, [0, 5])]
    problem = problem_of(*forward, *backward)
    assert candidates(problem, "articulation") == [0, 2]
    assert candidates(problem, "all") == [0, 1, 2]


def test_recorded_dtr_run_is_valid_plan_of_equal_cost() -> None:
    problem = reference_problem("gpt4l_b8")
    budget = int(0.6 * problem.keep_all_peak)
    record = replay(problem.trace, budget=budget, policy=DTR())
    plan = Given("dtr", record.schedule).plan(problem, budget)
    assert plan.recompute_ns == record.recompute_ns
    steps = steps_of(problem, record.schedule)
    assert sum(problem.cost[node] for node in steps) == plan.cost_ns
