"""Tests of the comparison of steps with and without a plan, at given times."""

from __future__ import annotations

import pytest
import torch

from rekindle.engine import Route
from rekindle.pytorch.learned import _step_times
from rekindle.pytorch.learned._step_plan import GRAPH, StepPlan
from rekindle.pytorch.learned._step_plans import StepPlans, plans_for
from rekindle.pytorch.learned._step_times import COMPARED, CREDIT, Comparison, StepTime, Upkeep

FIRST, LONGEST = 16, 1024
MET = [GRAPH, 4 | GRAPH, 8 | GRAPH]


@pytest.fixture(autouse=True)
def _as_in_programs(_afresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what the other tests of this folder set to follow every plan."""
    monkeypatch.setattr(_step_times, "SLOWER", 1.02)
    monkeypatch.setattr(_step_times, "UPKEEP", 0.01)
    monkeypatch.setattr(_step_times, "FIRST_INTERVAL", FIRST)
    monkeypatch.setattr(_step_times, "LONGEST_INTERVAL", LONGEST)


def lasting(total: int) -> StepTime:
    return StepTime(total, total // 10, 0)


class Program:
    """Equal steps that take `planned` with a plan and `alone` without it (both in ns)."""

    def __init__(self, planned: int, alone: int) -> None:
        self.planned, self.alone = planned, alone
        self.times = Comparison()
        for _ in range(COMPARED):
            self.times.ran_without_plan(lasting(alone))
        self.times.begin()

    def run(self, steps: int) -> int:
        """Run `steps` steps. Return how many of them followed the plan."""
        followed = 0
        for _ in range(steps):
            followed += self.times.follows
            if self.times.follows:
                self.times.ran_with_plan(lasting(self.planned))
            else:
                self.times.ran_without_plan(lasting(self.alone))
        return followed


def test_plan_with_slower_steps_is_left_after_three_steps() -> None:
    program = Program(planned=110, alone=100)
    assert program.run(FIRST) == COMPARED
    assert not program.times.follows
    assert program.times.verdict


def test_plan_with_faster_steps_is_followed_and_compared_rarely() -> None:
    program = Program(planned=90, alone=100)
    assert program.run(10_000) > 10_000 - 16 * COMPARED
    assert not program.times.verdict


def test_plan_within_noise_of_steps_without_it_is_followed() -> None:
    program = Program(planned=101, alone=100)
    assert program.run(1000) > 950


def test_plan_that_recomputes_more_in_equal_time_is_left() -> None:
    times = Comparison()
    for _ in range(COMPARED):
        times.ran_without_plan(StepTime(1000, 100, 0))
    times.begin()
    for _ in range(COMPARED):
        assert times.follows
        times.ran_with_plan(StepTime(990, 200, 0))
    for _ in range(COMPARED):
        assert not times.follows
        times.ran_without_plan(StepTime(1000, 100, 0))
    assert not times.follows


def test_plan_that_recomputes_more_in_less_time_is_followed() -> None:
    times = Comparison()
    for _ in range(COMPARED):
        times.ran_without_plan(StepTime(1000, 100, 0))
    times.begin()
    for _ in range(2 * COMPARED):
        assert times.follows
        times.ran_with_plan(StepTime(900, 200, 0))


def test_plan_that_becomes_slower_is_left_at_todays_price() -> None:
    program = Program(planned=90, alone=100)
    program.run(100)
    program.planned = 120
    program.run(FIRST + 2 * COMPARED)
    assert not program.times.follows
    program = Program(planned=90, alone=100)
    program.run(100)
    program.planned, program.alone = 180, 200  # the whole machine became slower
    assert program.run(1000) > 950


def test_left_plan_is_tried_again_and_followed_if_faster() -> None:
    program = Program(planned=110, alone=100)
    program.run(FIRST)
    program.alone = 150
    program.run(4 * FIRST)
    assert program.times.follows
    assert not program.times.verdict
    assert program.run(1000) > 950


def test_slower_plan_costs_little_however_long_the_program_runs() -> None:
    program = Program(planned=200, alone=100)
    assert program.run(20_000) < 30 * COMPARED


def test_single_slow_steps_do_not_end_a_plan() -> None:
    times = Comparison()
    for _ in range(COMPARED):
        times.ran_without_plan(lasting(100))
    times.begin()
    for number in range(FIRST - 1):
        times.ran_with_plan(lasting(500 if number % COMPARED else 90))
        assert times.follows


def test_plan_without_known_times_is_compared_after_some_steps() -> None:
    times = Comparison()
    for _ in range(FIRST):
        assert times.follows
        times.ran_with_plan(lasting(110))
    for _ in range(COMPARED):
        assert not times.follows
        times.ran_without_plan(lasting(100))
    assert not times.follows


def test_new_plan_is_followed_although_the_last_was_left() -> None:
    program = Program(planned=110, alone=100)
    program.run(FIRST)
    program.times.begin()
    assert program.times.follows
    assert not program.times.verdict


def planned() -> tuple[StepPlans, StepPlan]:
    plans = plans_for(1, torch.device("cpu"))
    plan = StepPlan(MET, [0, 1, 2], [0, 1, 2], None, begins_with="aten::mm")
    plans.shapes.append(plan)
    for _ in range(COMPARED):
        plans.over(MET, None, StepTime(100_000_000, 10_000_000, 0))
    plan.found(Route((0, 0, 0, 0), (), ()))
    return plans, plan


def test_slower_plan_is_left_with_both_times_in_the_report() -> None:
    plans, plan = planned()
    for _ in range(COMPARED):
        assert plans.beginning_with(MET[0]) is plan
        plans.along(plan, None, StepTime(130_000_000, 20_000_000, 5_000_000))
    assert plans.beginning_with(MET[0]) is None
    assert plan.route is not None
    for _ in range(COMPARED):
        plans.over(MET, None, StepTime(100_000_000, 10_000_000, 0))
    [note] = plans.left()
    assert note == (
        "the plan of steps of 3 operators that begin with aten::mm was left: "
        "130.0 ms (20.0 recomputing, 5.0 waiting) a step with the plan, "
        "100.0 ms (10.0 recomputing) without it"
    )


def test_steps_that_are_recorded_are_not_compared() -> None:
    """Recording takes time."""
    plans, plan = planned()
    recorded = StepPlan(MET, [0, 1, 2], [0, 1, 2], None)
    for _ in range(2 * COMPARED):
        plans.along(plan, recorded, lasting(900_000_000))
    assert plans.beginning_with(MET[0]) is plan


def test_plan_is_followed_if_times_are_unknown() -> None:
    plans, plan = planned()
    for _ in range(4 * FIRST):
        plans.along(plan, None, None)
    assert plans.beginning_with(MET[0]) is plan


def test_plan_file_keeps_name_of_first_operator() -> None:
    _, plan = planned()
    assert StepPlan.from_numbers(plan.as_numbers()).begins_with == "aten::mm"


def test_upkeep_is_affordable_at_a_hundredth_of_the_program() -> None:
    upkeep = Upkeep()
    for _ in range(CREDIT):
        assert upkeep.affordable
        upkeep.add(50, 100)
    assert not upkeep.affordable
    upkeep.add(0, CREDIT * 50 * 100)
    assert upkeep.affordable


def test_steps_that_never_repeat_are_recorded_only_if_affordable() -> None:
    plans = plans_for(1, torch.device("cpu"))
    recorded = 0
    for number in range(10 * CREDIT):
        ids = [GRAPH, (number + 1) << 2 | GRAPH]
        records = plans.wanted and plans.wants_more()
        if plans.wanted:
            written = StepPlan(ids, [0, 1], [0, 1], None) if records else None
            plans.over(ids, written)
        recorded += records
        plans.upkeep.add(30 if records else 1, 100)  # the learner takes up to a third of the time
    assert 0 < recorded < CREDIT
    plans.upkeep.add(0, 10**6)
    assert plans.wanted


def test_found_plan_is_followed_although_upkeep_takes_long() -> None:
    plans, plan = planned()
    for _ in range(2 * CREDIT):
        plans.upkeep.add(100, 100)
    assert plans.wanted
    assert plans.beginning_with(MET[0]) is plan
