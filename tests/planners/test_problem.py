"""Tests of the planning problem that is made from a trace of a program.

It has fixed bytes (such as parameters), user-held values, views, and pinned values.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from rekindle import InvalidTrace
from rekindle.planners import Problem
from rekindle.planners._problem import Hold
from rekindle.planners._sequence import prune, timeline
from rekindle.planners._writer import to_schedule
from rekindle.schedule import verify
from rekindle.trace import TraceBuilder, keep_all_peak
from tests.planners.helpers import problem_of, reference, reference_problem
from tests.strategies import examples, traces


def test_parameters_count_as_fixed_bytes_of_planner_problem() -> None:
    builder = TraceBuilder()
    weight = builder.source(100, held=True)
    (x,) = builder.call("x", 1, [weight], [8])
    builder.release(x)
    problem = Problem.of(builder.build())
    assert (problem.fixed, len(problem), problem.nbytes) == (100, 1, (8,))
    assert problem.floor == 108


def test_planner_problem_lists_interval_of_user_held_value() -> None:
    builder = TraceBuilder()
    (x,) = builder.call("x", 1, [], [8], held=True)
    (y,) = builder.call("y", 1, [x], [4])
    builder.drop(x)
    builder.call("z", 1, [y], [1])
    problem = Problem.of(builder.build())
    assert problem.holds == (Hold(0, 0, 1),)


def test_planner_problem_has_node_for_each_read_by_program() -> None:
    builder = TraceBuilder()
    (x,) = builder.call("x", 1, [], [8])
    builder.call("y", 1, [], [4])
    builder.use(x)
    problem = Problem.of(builder.build())
    assert problem.op[2] is None
    assert problem.reads[2] == (0,)


def test_plan_recreates_view_of_evicted_storage() -> None:
    builder = TraceBuilder()
    (x,) = builder.call("x", 5, [], [8])
    (view,) = builder.call("view", 1, [x], [0], aliases=[x])
    builder.call("big", 1, [], [8])
    builder.call("y", 1, [view], [4])
    problem = Problem.of(builder.build())
    assert problem.reads[3] == (0,)
    line = timeline(problem, [0, 1, 2, 0, 3])
    cost = verify(problem.trace, to_schedule(line, "test"), 20)
    assert cost.recompute_ns == 5 + 1
    assert cost.peak == 12


def test_source_freed_early_is_not_in_fixed_bytes_of_problem() -> None:
    """The batch is freed before the end, so it is no fixed memory like the weight."""
    builder = TraceBuilder()
    batch = builder.source(16, held=True)
    weight = builder.source(100, held=True)
    builder.drop(batch)
    (x,) = builder.call("x", 1, [weight], [8])
    builder.call("y", 1, [x], [8])
    problem = Problem.of(builder.build())
    assert (problem.fixed, len(problem)) == (100, 3)
    cost = verify(problem.trace, to_schedule(timeline(problem, range(3)), "test"), 116)
    assert cost.peak == 116


def test_pinned_value_is_resident_until_its_last_use() -> None:
    """Pinned values are not evicted, like the indices that a mixture of experts computes."""
    builder = TraceBuilder()
    (choice,) = builder.call("topk", 1, [], [8], held=True)
    builder.pin(choice)
    builder.retain(choice)
    builder.drop(choice)
    (x,) = builder.call("x", 1, [choice], [8])
    (y,) = builder.call("y", 1, [x], [8])
    builder.call("back", 1, [choice, y], [8])
    builder.release(choice)
    builder.call("end", 1, [y], [8])
    problem = Problem.of(builder.build())
    held = {node for hold in problem.holds for node in range(hold.first, hold.last + 1)}
    assert {problem.op[node] for node in held} >= {0, 1, 2, 3}
    assert problem.op.index(4) not in held


@given(traces())
@examples(80)
def test_peak_of_keep_all_plan_is_at_most_peak_of_trace(trace) -> None:
    problem = Problem.of(trace)
    line = timeline(problem, range(len(problem)))
    assert verify(trace, to_schedule(line, "keep")).recompute_ns == 0
    assert problem.floor <= line.peak
    # A plan may free a source after its last use. `keep_all_peak` counts it to the end.
    assert line.peak <= keep_all_peak(trace)


def test_pruned_plan_has_no_operator_with_unread_results() -> None:
    problem = problem_of((1, 1, []), (1, 1, [0]), (1, 1, [0]))
    assert prune(problem, [0, 1, 0, 0, 2, 1]) == [0, 1, 0, 2]


def test_reference_graphs_have_known_costs_and_peaks() -> None:
    for row in reference("static_reference.json")["rows"]:
        problem = reference_problem(row["graph"])
        assert problem.keep_all_peak == row["keep_all_peak"]
        assert problem.compute_ns == row["base_cost"] * 1000
        assert int(row["ratio"] * problem.keep_all_peak) == row["budget"]


def test_planner_problem_of_invalid_trace_is_refused() -> None:
    builder = TraceBuilder()
    builder.call("x", 1, [], [1])
    trace = builder.build()
    bad = type(trace)(trace.storages, trace.values, trace.ops, ())
    with pytest.raises(InvalidTrace):
        Problem.of(bad)
