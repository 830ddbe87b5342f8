"""Tests of the planner Revolve (optimal checkpoints in a chain of equal steps).

Its costs equal its published formula, and those of an exhaustive search.
"""

from __future__ import annotations

from functools import cache
from math import comb

import pytest

from rekindle.planners import Revolve, Status
from rekindle.planners.revolve import chain_length, forwards, split
from tests.planners.helpers import exhaustive, problem_of, unit_chain


@cache
def recurrence(length: int, slots: int) -> float:
    if length == 0:
        return 0
    if slots == 0:
        return float("inf")
    return min(
        j + recurrence(length - j, slots - 1) + recurrence(j - 1, slots)
        for j in range(1, length + 1)
    )


@pytest.mark.parametrize("slots", range(1, 8))
def test_revolve_cost_formula_satisfies_recurrence(slots: int) -> None:
    assert [forwards(n, slots) for n in range(40)] == [recurrence(n, slots) for n in range(40)]


def test_revolve_cost_equals_published_formula() -> None:
    """Griewank's t(l, s) = r l - C(s+r, r-1), for l steps and s checkpoints.

    With r repetitions, at most C(s+r, s) steps can be reversed.
    """
    for slots in range(1, 6):
        for sweeps in range(1, 6):
            length = comb(slots + sweeps, slots)
            expected = sweeps * length - comb(slots + sweeps, sweeps - 1)
            assert forwards(length - 1, slots) == expected


def test_revolve_split_point_gives_least_cost() -> None:
    for length in range(1, 30):
        for slots in range(1, 6):
            j = split(length, slots)
            assert forwards(length, slots) == (
                j + recurrence(length - j, slots - 1) + recurrence(j - 1, slots)
            )


@pytest.mark.parametrize("length", [2, 3, 5, 6])
def test_revolve_cost_equals_exhaustive_search(length: int) -> None:
    problem = unit_chain(length)
    for budget in range(3, problem.keep_all_peak + 1):
        plan = Revolve().plan(problem, budget)
        assert plan.status is Status.OPTIMAL
        assert plan.cost_ns == exhaustive(problem, budget)


def test_revolve_plan_of_chain_has_cost_of_formula() -> None:
    problem = unit_chain(40)
    for budget in range(3, 43):
        plan = Revolve().plan(problem, budget)
        assert plan.cost_ns == 1000 * (forwards(40, min(budget - 2, 40)) + 41)
        assert plan.peak <= budget


def test_chain_length_of_graph_without_uniform_chain_is_none() -> None:
    assert chain_length(unit_chain(4)) == 4
    assert chain_length(problem_of((1, 1, []), (1, 2, [0]), (1, 1, [0, 1]))) is None
    assert chain_length(problem_of((1, 1, []), (1, 1, [0]), (1, 1, [1]))) is None
