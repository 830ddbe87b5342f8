"""Tests of the planner Checkmate, which solves an integer program: its plans are optimal.

Plans rounded from the linear relaxation of that program cost at least the optimum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from rekindle.planners import Checkmate, Cuts, Problem, Rounding, Status
from rekindle.planners._milp import Model, Solution
from tests.planners.helpers import exhaustive, reference_problem, small_graphs, unit_chain
from tests.strategies import examples

QUIET = examples(60)


@given(small_graphs(most=6))
@QUIET
def test_checkmate_optimum_equals_brute_force(drawn: tuple[Problem, int]) -> None:
    problem, budget = drawn
    best = exhaustive(problem, budget)
    plan = Checkmate(time_limit=20).plan(problem, budget)
    if best is None:
        assert plan.status is Status.INFEASIBLE
        assert plan.smallest_budget is None or exhaustive(problem, plan.smallest_budget) is not None
    elif plan.schedule is not None:
        assert plan.cost_ns == best
        assert plan.status is Status.OPTIMAL
    else:  # in Checkmate a node runs at most once in each stage, so there may be no plan
        assert plan.status is Status.INFEASIBLE


@given(small_graphs(most=8))
@QUIET
def test_checkmate_optimum_lies_between_relaxation_and_rounding(
    drawn: tuple[Problem, int],
) -> None:
    problem, budget = drawn
    exact = Checkmate(time_limit=20).plan(problem, budget)
    rounded = Rounding().plan(problem, budget)
    relaxed = Cuts(time_limit=1).plan(problem, budget)
    if exact.cost_ns is not None:
        assert relaxed.bound_ns <= exact.cost_ns
        assert rounded.bound_ns <= exact.cost_ns
        if rounded.cost_ns is not None:
            assert rounded.cost_ns >= exact.cost_ns


# static_reference.json: budget and best cost of the uniform chains of 4 and 8 layers.
@pytest.mark.parametrize(
    ("length", "budget", "cost"),
    [
        (4, 5, 10),
        (4, 4, 11),
        (4, 3, 15),
        (8, 9, 18),
        (8, 8, 19),
        (8, 7, 20),
        (8, 5, 22),
        (8, 4, 26),
    ],
)
def test_checkmate_plans_of_unit_chains_have_published_cost(
    length: int, budget: int, cost: int
) -> None:
    plan = Checkmate().plan(unit_chain(length), budget)
    assert (plan.status, plan.cost_ns) == (Status.OPTIMAL, cost * 1000)


def test_checkmate_second_solve_gets_only_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is no plan, the planner solves again, to find the smallest budget that has one."""
    limits: list[float] = []
    solve = Model.solve

    def noting(model: Model, *, time_limit: float, **options: Any) -> Solution:
        limits.append(time_limit)
        found = solve(model, time_limit=time_limit, **options)
        return replace(found, infeasible=len(limits) == 1)

    monkeypatch.setattr(Model, "solve", noting)
    assert Checkmate(time_limit=50.0).plan(unit_chain(4), 3).status is Status.INFEASIBLE
    first, second = limits
    assert 50.0 > first > second


def test_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    Checkmate().plan(unit_chain(6), 5)
    assert capfd.readouterr() == ("", "")


def test_checkmate_below_smallest_budget_names_that_budget() -> None:
    plan = Checkmate().plan(unit_chain(4), 2)
    assert plan.status is Status.INFEASIBLE
    assert plan.smallest_budget == 3


def test_checkmate_of_too_large_problem_suggests_cuts_planner() -> None:
    plan = Checkmate().plan(reference_problem("gpt12l_b8"), 2_000_000_000)
    assert plan.status is Status.UNSUITED
    assert "write Cuts()" in plan.message
