"""Tests of `learn="auto"`: repeating steps are planned, and slow plans are abandoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rekindle
from rekindle.engine import Route
from rekindle.pytorch.context import _arguments
from rekindle.pytorch.learned._step_plan import GRAPH, StepPlan
from rekindle.pytorch.learned._step_plans import (
    LONGEST_PAUSE,
    MOST_LENGTHS,
    PATIENCE,
    TRIES,
    StepPlans,
    plans_for,
)
from tests.pytorch.learned.conftest import AtOnce
from tests.pytorch.learned.test_learned_plans import Training, budget_of
from tests.pytorch.plans import forget_plans


def trained(steps: int, budget: int | None, **options: Any) -> tuple[Training, Any]:
    training = Training()
    with rekindle.budget(budget, **options) as run:
        for number in range(steps):
            training.step(number)
    return training, run


def test_program_with_repeating_steps_is_planned_automatically() -> None:
    steps = PATIENCE + 8
    plain = Training()
    for number in range(steps):
        plain.step(number)
    training, run = trained(steps, budget_of())
    # One step passes before the recording, and three steps are recorded.
    assert run.steps_followed == steps - PATIENCE - 4
    assert "steps planned" in str(run.report())
    for one, other in zip(training.left_behind(), plain.left_behind(), strict=True):
        assert torch.equal(one, other)


def test_program_of_few_steps_makes_no_learned_plan() -> None:
    _, run = trained(PATIENCE, budget_of())
    assert run.recomputations > 0
    assert AtOnce.made == run.steps_followed == 0
    assert "steps planned" not in str(run.report())


def test_program_without_evictions_is_not_recorded() -> None:
    training = Training()
    with rekindle.budget(budget_of(1.5)) as run:
        for number in range(PATIENCE):
            training.step(number)
            training.model(torch.zeros(2, 64))
            assert run._learner is not None
            assert run._learner.remembered == 0


def test_budgets_around_single_steps_share_learned_plans() -> None:
    training, followed = Training(), 0
    for number in range(PATIENCE + 8):
        with rekindle.budget(budget_of()) as run:
            training.step(number)
        followed += run.steps_followed
    assert followed > 0


def test_program_with_cached_plan_follows_it_from_third_step() -> None:
    trained(PATIENCE + 6, budget_of())
    forget_plans()  # simulates another process
    _, run = trained(6, budget_of())
    assert AtOnce.made == 1
    assert run.steps_followed >= 4


@pytest.mark.parametrize("options", [{"learn": False}, {"record": True}, {"evict": "anything"}])
def test_options_that_disable_learning_make_no_plan(options: dict[str, Any]) -> None:
    _, run = trained(PATIENCE + 6, budget_of(), **options)
    assert run._learner is None
    assert AtOnce.made == 0


def test_learning_without_highspy_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_arguments, "find_spec", lambda name: None)
    _, run = trained(2, budget_of())
    assert run._learner is None


# -- when steps are recorded and plans are followed -----------------------------------------------

MET = [GRAPH, 4 | GRAPH, 8 | GRAPH]


def planned(plans: StepPlans) -> StepPlan:
    plan = StepPlan(MET, [0, 1, 2], [0, 1, 2], None, route=Route((0, 0, 0, 0), (), ()))
    plans.shapes.append(plan)
    return plan


def test_learning_pauses_longer_after_repeatedly_abandoned_plans() -> None:
    plans = plans_for(1, torch.device("cpu"))
    tried = 0
    for _ in range(10_000):
        tried += not plans.resting
        plans.ended(evicting=True, followed=False, left=not plans.resting)
    assert 10_000 / LONGEST_PAUSE < tried < 10_000 / LONGEST_PAUSE + 20
    while plans.resting:
        plans.ended(evicting=True, followed=False, left=False)
    plans.ended(evicting=True, followed=True, left=False)
    for _ in range(TRIES - 1):
        plans.ended(evicting=True, followed=False, left=True)
        assert not plans.resting
    plans.ended(evicting=True, followed=False, left=True)
    assert plans.resting


def test_automatic_planning_waits_until_steps_have_equal_length() -> None:
    plans = plans_for(1, torch.device("cpu"), patient=True)
    for number in range(50 * MOST_LENGTHS):
        plans.over(MET * (number + 1), None)
        assert not plans.wants_more()
    for _ in range(PATIENCE + 1):
        assert not plans.wants_more()
        plans.over(MET, None)
    assert plans.wants_more()


def test_learn_true_and_automatic_planning_share_plans() -> None:
    """If each had its own plans, `learn=True` could wait forever for the other one's search."""
    plans = plans_for(1, torch.device("cpu"), patient=True)
    assert plans_for(1, torch.device("cpu"), patient=True) is plans
    assert plans.patient
    assert plans_for(1, torch.device("cpu")) is plans
    assert not plans.patient
    assert plans.wanted
    plans.over(MET, None)
    assert plans.wants_more()


def test_automatic_planning_starts_only_after_recent_evictions() -> None:
    plans = plans_for(1, torch.device("cpu"), patient=True)
    assert not plans.wanted
    plans.ended(evicting=True, followed=False, left=False)
    for _ in range(PATIENCE):
        assert plans.wanted
        plans.ended(evicting=False, followed=False, left=False)
    assert not plans.wanted
    assert plans_for(1, torch.device("cpu")).wanted  # learn=True plans in any case
