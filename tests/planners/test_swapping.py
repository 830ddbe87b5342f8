"""Tests of plans that recompute some values and swap others to the host.

They are valid, and no slower than simulated runs of policies, from which the search starts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine import NoRoom
from rekindle.planners import Cuts, Problem, Status
from rekindle.planners._lives import Gap, gaps
from rekindle.planners._relaxation import Bandwidth
from rekindle.planners._sequence import prune, timeline
from rekindle.planners._squeeze import squeeze
from rekindle.planners._writer import timed_schedule
from rekindle.planners.given import steps_of
from rekindle.policies import DTR, Swap
from rekindle.schedule import Free, Record, Schedule, SwapIn, SwapOut, verify
from rekindle.simulator import replay
from rekindle.trace import Trace, TraceBuilder, chain
from tests.engine.test_swap import BYTE_PER_NS, swaps
from tests.planners.fastest import fastest
from tests.planners.helpers import problem_of, small_graphs
from tests.strategies import examples, problems

PER_US = 1_000_000  # bytes per second
RATES = st.sampled_from([PER_US // 10, PER_US, 10 * PER_US])


def _runs(trace: Trace, budget: int, swap: Swap) -> list[Record]:
    """Return three simulated runs: one only recomputes, one only swaps, and one may do both."""
    runs: list[Record] = []
    for way in (None, replace(swap, only=True), replace(swap, only=False)):
        try:
            runs.append(replay(trace, budget=budget, policy=DTR(), swap=way))
        except NoRoom:
            continue
    return runs


@pytest.mark.slow
@given(problem=problems(), swap=swaps())
@examples(25)
def test_plan_with_swaps_is_valid_and_no_slower_than_known_runs(
    problem: tuple[Trace, int], swap: Swap
) -> None:
    trace, budget = problem
    runs = _runs(trace, budget, swap)
    known = tuple(run.schedule for run in runs)
    plan = Cuts(time_limit=2, swap=swap, known=known).plan(Problem.of(trace), budget)
    if plan.schedule is None:
        assert not runs
        return
    cost = verify(trace, plan.schedule, budget, swap=swap)
    assert (plan.cost_ns, plan.waiting_ns) == (cost.total_ns, cost.waiting_ns)
    assert (plan.peak, plan.swapped_out) == (cost.peak, cost.swapped_out)
    sent = {each.storage for each in plan.schedule.actions if isinstance(each, SwapOut)}
    assert sent == {each.storage for each in plan.schedule.actions if isinstance(each, SwapIn)}
    for run in runs:
        assert cost.total_ns <= run.compute_ns + run.recompute_ns + run.waiting_ns
    assert plan.bound_ns <= cost.total_ns


@given(problem=problems(), swap=swaps())
@examples(60)
def test_schedule_with_recalculated_swap_times_is_valid(
    problem: tuple[Trace, int], swap: Swap
) -> None:
    trace, budget = problem
    distilled = Problem.of(trace)
    for run in _runs(trace, budget, swap):
        steps = prune(distilled, steps_of(distilled, run.schedule))
        line = timeline(distilled, steps)
        budget = max(budget, line.peak)
        schedule, end = timed_schedule(line, "anew", budget=budget, swap=swap)
        cost = verify(trace, schedule, budget, swap=replace(swap, host=None))
        assert cost.total_ns == end
        assert cost.peak <= budget


@given(small_graphs(most=4), RATES, RATES)
@examples(25)
def test_plan_with_swaps_is_no_faster_than_fastest_run(
    drawn: tuple[Problem, int], out: int, back: int
) -> None:
    problem, budget = drawn
    plan = Cuts(time_limit=2, swap=Swap(None, out, back)).plan(problem, budget)
    best = fastest(problem, budget, Bandwidth(out, back))
    if plan.cost_ns is not None:
        assert best is not None
        assert plan.bound_ns <= best <= plan.cost_ns


@pytest.mark.parametrize(
    ("rate", "end"),
    [(100 * PER_US, 13_040), (PER_US, 20_000), (PER_US // 100, 23_000)],
)
def test_plan_with_faster_host_swaps_more(rate: int, end: int) -> None:
    """The first of three values is read last. Each value has 4 bytes, and only two values fit."""
    problem = problem_of((10, 4, []), (1, 4, []), (1, 4, [1]), (1, 0, [0]))
    plan = Cuts(time_limit=2, swap=Swap(None, rate, rate)).plan(problem, 8)
    assert plan.cost_ns == end
    assert plan.swapped_out == (4 if end < 23_000 else 0)


def _dear() -> tuple[Trace, int, Swap]:
    """Return a chain of expensive operators, a budget of half of its memory, and a bandwidth.

    With this bandwidth, copies to the host can overlap compute.
    """
    trace = chain(16, nbytes=10, cost=1000)
    problem = Problem.of(trace)
    return trace, problem.keep_all_peak // 2, Swap(None, BYTE_PER_NS // 50, BYTE_PER_NS // 50)


def test_plan_whose_swaps_overlap_compute_is_proven_optimal() -> None:
    trace, budget, swap = _dear()
    plan = Cuts(time_limit=5, swap=swap).plan(Problem.of(trace), budget)
    assert plan.status is Status.OPTIMAL
    assert plan.overhead == 0
    assert plan.swapped_out > 0
    assert plan.schedule is not None
    kinds = {type(action) for action in plan.schedule.actions}
    assert {SwapOut, SwapIn} <= kinds


def test_plan_with_host_memory_of_zero_does_not_swap() -> None:
    trace, budget, swap = _dear()
    problem = Problem.of(trace)
    plan = Cuts(time_limit=2, swap=replace(swap, host=0)).plan(problem, budget)
    assert plan.swapped_out == 0
    assert plan.cost_ns == Cuts(time_limit=2).plan(problem, budget).cost_ns


def test_plan_swaps_out_at_most_host_memory() -> None:
    trace, budget, swap = _dear()
    plan = Cuts(time_limit=2, swap=replace(swap, host=20)).plan(Problem.of(trace), budget)
    assert plan.schedule is not None
    assert 0 < verify(trace, plan.schedule, budget).host_peak <= 20


def test_plan_with_swap_below_smallest_budget_is_infeasible() -> None:
    trace, _, swap = _dear()
    plan = Cuts(time_limit=2, swap=swap).plan(Problem.of(trace), 9)
    assert plan.status is Status.INFEASIBLE
    assert plan.schedule is None


def test_plan_swaps_out_value_unused_for_longest_time() -> None:
    problem = problem_of((1, 4, []), (1, 4, [0]), (1, 4, [1]), (1, 4, [1, 2]), (1, 0, [0, 3]))
    line = timeline(problem, range(5))
    assert gaps(line) == [Gap(0, 1, 4)]
    assert squeeze(line, 12) == [0, 1, 2, 3, ~0, 4]
    assert squeeze(line, 8) is None


def test_plan_with_swap_in_before_swap_out_raises() -> None:
    problem = problem_of((1, 4, []), (1, 0, [0]))
    with pytest.raises(ValueError, match="not on the host"):
        timeline(problem, [~0, 0, 1])


def test_repeated_search_with_swap_gives_same_plan() -> None:
    trace, budget, swap = _dear()
    plans = [Cuts(time_limit=60, swap=swap).plan(Problem.of(trace), budget) for _ in range(2)]
    assert plans[0].schedule == plans[1].schedule
    assert isinstance(plans[0].schedule, Schedule)


def _until_the_first_eviction(record: Record) -> list[object]:
    names: list[object] = []
    for action in record.actions:
        names.append(action)
        if isinstance(action, Free | SwapOut):
            break
    return names


def test_plan_is_faster_than_any_online_policy() -> None:
    """Two programs begin alike, but only one of them reads the evicted value again.

    Swapping the value out loses time in one program; freeing it loses time in the other. When an
    online policy must decide, it cannot know which program it runs.
    """
    swap = Swap(None, BYTE_PER_NS, BYTE_PER_NS)
    budget = 8
    lost = 0
    for wanted in (True, False):
        builder = TraceBuilder()
        (first,) = builder.call("first", 1000, (), [8])
        (second,) = builder.call("second", 10, (), [8])
        builder.release(second)
        builder.call("backward", 10, [first] if wanted else [], [], replayable=False)
        builder.release(first)
        trace = builder.build()
        recompute, only, online = _runs(trace, budget, swap)
        assert (recompute.overhead > only.overhead) == wanted
        begun = [_until_the_first_eviction(run) for run in (recompute, only)]
        assert begun[0][:-1] == begun[1][:-1]
        assert _until_the_first_eviction(online) in begun
        better = min(recompute.overhead, only.overhead)
        lost += online.overhead > better
        plan = Cuts(time_limit=2, swap=swap).plan(Problem.of(trace), budget)
        assert plan.overhead == better
    assert lost == 1
