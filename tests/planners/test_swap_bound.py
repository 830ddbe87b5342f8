"""Tests of the lower bound of the time of any run that may swap values to the host.

No run is faster than the bound, and some runs are as fast.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rekindle.engine import NoRoom
from rekindle.planners import Problem
from rekindle.planners._relaxation import Bandwidth
from rekindle.planners._swap_bound import swap_bound
from rekindle.policies import DTR, Swap
from rekindle.simulator import replay
from tests.planners.fastest import fastest
from tests.planners.helpers import exhaustive, problem_of, small_graphs
from tests.strategies import examples, problems

PER_US = 1_000_000  # bytes per second
RATES = st.sampled_from([PER_US // 10, PER_US, 10 * PER_US])


@given(small_graphs(most=4), RATES, RATES)
@examples(25)
def test_swap_bound_is_at_most_fastest_run_of_small_graph(
    drawn: tuple[Problem, int], out: int, back: int
) -> None:
    problem, budget = drawn
    bandwidth = Bandwidth(out, back)
    bound = swap_bound(problem, budget, bandwidth, cuts=len(problem))
    best = fastest(problem, budget, bandwidth)
    if best is not None:
        assert bound is not None
        assert bound <= best


@given(problems(longest=12), RATES)
@examples(60)
def test_swap_bound_is_at_most_time_of_simulated_run(drawn, rate: int) -> None:
    trace, budget = drawn
    swap = Swap(out_bytes_per_s=1000 * rate, in_bytes_per_s=1000 * rate)
    try:
        record = replay(trace, budget=budget, policy=DTR(), swap=swap)
    except NoRoom:
        assume(False)
        raise
    bound = swap_bound(Problem.of(trace), budget, Bandwidth(1000 * rate, 1000 * rate))
    assert bound is not None
    assert bound <= record.compute_ns + record.recompute_ns + record.waiting_ns


def _loop() -> Problem:
    """Return a problem whose first value is read last.

    Each value has 4 bytes, and only two values fit.
    """
    return problem_of((10, 4, []), (1, 4, []), (1, 4, [1]), (1, 0, [0]))


@pytest.mark.parametrize(
    ("rate", "end"),
    [(100 * PER_US, 13_040), (PER_US, 20_000), (PER_US // 100, 23_000)],
)
def test_swap_bound_of_loop_equals_fastest_run(rate: int, end: int) -> None:
    """With a fast host, copies nearly overlap compute. With a slow one, the run waits for them.

    With the slowest host, recomputation is faster.
    """
    bandwidth = Bandwidth(rate, rate)
    assert swap_bound(_loop(), 8, bandwidth, cuts=4) == pytest.approx(end, abs=1)
    assert fastest(_loop(), 8, bandwidth) == end


def test_swap_bound_of_slow_host_equals_cost_of_recomputation() -> None:
    problem = _loop()
    bounds = [swap_bound(problem, 8, Bandwidth(rate, rate), cuts=4) for rate in (10**3, 10**6)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] == pytest.approx(exhaustive(problem, 8), abs=1)
