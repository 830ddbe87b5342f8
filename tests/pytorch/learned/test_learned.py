"""Tests of learned plans: they change when values are computed, and nothing else.

Planning is waited for. Except in a few tests, a plan is the record of another policy, which is
ready at once.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch import Run
from rekindle.pytorch.learned import _step_plans
from rekindle.pytorch.learned._background import Planning
from rekindle.pytorch.learned._sequence_matcher import GRAPH
from rekindle.pytorch.learned._step_plan import StepPlan
from rekindle.pytorch.learned._step_plans import MOST_PLANS, StepPlans, forget_plans, plans_for
from rekindle.schedule import verify
from rekindle.trace import chain
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.test_models import differing, everything, plainly
from tests.pytorch.tracker import Measured, Tracker, measure

WIDTH, BATCH = 64, 128


class Deep(nn.Module):
    """Layers with dropout, a batch norm and an in-place activation.

    The last ones may be left out.
    """

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Dropout()
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor, depth: int | None = None) -> Tensor:
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x)) + x
        return x.square().mean()


class Training:
    """A model and an optimizer, and what is left when they have made some steps."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Deep()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.losses: list[Tensor] = []

    def step(self, number: int, *, depth: int | None = None, batch: int = BATCH) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        loss = self.model(torch.randn(batch, WIDTH, generator=generator), depth)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def left_behind(self) -> list[Tensor]:
        state = self.model.state_dict()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [*self.losses, *state.values(), *gradients, torch.get_rng_state()]


Steps = Callable[[Training], object]


def six(training: Training) -> None:
    for number in range(6):
        training.step(number)


@functools.cache
def measured(steps: Steps) -> Measured:
    return measure(lambda: steps(Training()))


def budget_of(fraction: float = 0.5, steps: Steps = six) -> int:
    return measured(steps).budget(fraction)


def assert_alike(steps: Steps, budget: int, **options: Any) -> Run:
    """The steps in one context, learning, leave what they leave without it."""
    plain = Training()
    steps(plain)
    expected = [value.clone() for value in plain.left_behind()]
    training = Training()
    with Tracker(resized=True) as tracker, rekindle.budget(budget, learn="wait", **options) as run:
        steps(training)
    assert tracker.peak <= budget
    got = training.left_behind()
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert run.recomputations > 0
    return run


@pytest.mark.usefixtures("for_real")
def test_a_plan_is_made_in_another_process() -> None:
    training = Training()
    with rekindle.budget(budget_of(), learn="wait") as run:
        for number in range(4):
            training.step(number)
    assert (run.steps_followed, run.steps_left) == (1, 0)
    (shape,) = learned(run).shapes
    assert shape.route is not None
    assert 0 <= shape.route.bound_ns <= shape.route.recompute_ns > 0


@pytest.mark.usefixtures("for_real")
def test_step_that_ends_with_its_function_is_followed() -> None:
    """The batch and the loss outlive the optimizer's step, where the next one begins."""
    training = Training()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), foreach=True)

    def step(number: int) -> None:
        training.optimizer.zero_grad()
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = training.model(batch)
        loss.backward()
        training.optimizer.step()

    with rekindle.budget(budget_of(), learn="wait") as run:
        for number in range(4):
            step(number)
    assert (run.steps_followed, run.steps_left) == (1, 0)


def learned(run: Run) -> StepPlans:
    assert run._learner is not None
    return run._learner.plans


def test_steps_follow_a_plan_from_the_fourth_on() -> None:
    run = assert_alike(six, budget_of())
    assert (run.steps_followed, run.steps_left) == (3, 0)
    assert "3   followed to the end, 0 left" in str(run.report())


def test_record_of_planned_steps_passes_verifier() -> None:
    run = assert_alike(six, budget_of(), record=True)
    assert run.steps_followed == 3
    cost = verify(run.trace, run.record.schedule, run.budget)
    assert (cost.recompute_ns, cost.peak) == (run.recompute_ns, run.peak)


def test_planned_step_recomputes_no_more_than_planned() -> None:
    training = Training()
    with rekindle.budget(budget_of(), learn="wait") as run:
        for number in range(3):
            training.step(number)
            training.losses.clear()  # which take room that the next step was not planned without
        before = run.recomputations
        training.step(3)
        (shape,) = learned(run).shapes
        assert shape.route is not None
        assert run.steps_followed == 1
        # Counted, not timed: prices settle only within the first steps.
        assert run.recomputations - before <= len(shape.route.restores)


def test_step_that_differs_from_plan_leaves_plan() -> None:
    def steps(training: Training) -> None:
        for number in range(8):
            training.step(number, depth=5 if number == 4 else None)

    run = assert_alike(steps, budget_of(steps=steps))
    assert (run.steps_followed, run.steps_left) == (4, 1)
    assert "of the step was" in str(run.report())


def test_batches_of_varying_length_each_get_their_plan() -> None:
    def steps(training: Training) -> None:
        for number in range(12):
            training.step(number, batch=(BATCH, BATCH - 32)[number % 2])

    run = assert_alike(steps, budget_of(0.4, steps))
    shapes = learned(run).shapes
    assert len([shape for shape in shapes if shape.route is not None]) == 2
    assert run.steps_followed >= 4
    assert run.steps_left <= 2  # while only one of them has a plan


def test_plans_of_two_shapes_share_common_beginning() -> None:
    def steps(training: Training) -> None:
        for number in range(14):
            training.step(number, depth=(None, 6)[number % 2])

    run = assert_alike(steps, budget_of(0.4, steps))
    assert run.steps_followed >= 4
    assert run.steps_left <= 2  # while only one of them has a plan


def test_plans_are_shared_between_contexts() -> None:
    budget = budget_of()
    plain = Training()
    six(plain)
    expected = [value.clone() for value in plain.left_behind()]
    training = Training()
    followed = 0
    for number in range(6):
        with Tracker(resized=True) as tracker, rekindle.budget(budget, learn="wait") as run:
            training.step(number)
        assert tracker.peak <= budget
        followed += run.steps_followed
    got = training.left_behind()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert followed >= 2


class Bang(Exception):
    pass


def test_exception_in_planned_step_keeps_plan() -> None:
    budget = budget_of()

    def fail(gradient: Tensor) -> None:
        raise Bang

    def fails(training: Training) -> None:
        training.optimizer.zero_grad()
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(4))
        loss = training.model(x)
        hook = loss.register_hook(fail)
        with pytest.raises(Bang):
            loss.backward()
        hook.remove()

    def steps(training: Training) -> None:
        for number in range(8):
            if number == 4:
                fails(training)
            training.step(number)

    run = assert_alike(steps, budget)
    assert run.steps_left == 0  # its step starts again, and is followed then
    assert run.steps_followed == 5


def test_out_of_budget_in_planned_step_raises() -> None:
    training = Training()
    budget = budget_of()

    def four_and_a_large_one() -> None:
        with rekindle.budget(budget, learn="wait") as run:
            for number in range(4):
                training.step(number)
            assert run.steps_followed == 1
            training.step(4, batch=64 * BATCH)

    with pytest.raises(rekindle.OutOfBudget):
        four_and_a_large_one()
    with rekindle.budget(budget, learn="wait") as run:
        training.step(5)
    assert run.peak <= budget


def test_off_is_off() -> None:
    training = Training()
    with rekindle.budget(budget_of(), learn=False) as run:
        six(training)
    assert run.recomputations > 0
    assert run._driver.watcher is None
    assert run.wait_for_plan(0.0)
    assert run.steps_followed == run.steps_left == 0
    assert "steps planned" not in str(run.report())


def test_ample_budget_learns_no_plan() -> None:
    training = Training()
    with rekindle.budget(budget_of(1.5), learn="wait") as run:
        six(training)
    assert run.evictions == 0
    assert learned(run).shapes == []


@pytest.mark.usefixtures("for_real")
def test_a_plan_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.pytorch.learned._background.MODULE", "rekindle.no_such_module")
    run = assert_alike(six, budget_of())
    assert run.steps_followed == 0
    assert "no_such_module" in str(run.report())


@pytest.mark.usefixtures("for_real")
def test_training_continues_during_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step_plans, "SECONDS", 1e6)
    training = Training()
    with rekindle.budget(budget_of(), learn=True) as run:
        six(training)
        assert not run.wait_for_plan(0.0)
        (_, planning, _) = learned(run)._planning or pytest.fail("no plan")
        process = planning._process
        forget_plans()
        assert process.poll() is not None
        assert not planning._folder.exists()


@pytest.mark.usefixtures("for_real")
def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.frozen", True, raising=False)
    run = assert_alike(six, budget_of())
    assert run.steps_followed == 0
    assert "no process to plan in" in str(run.report())


def test_planning_process_ends_with_its_owner() -> None:
    planning = Planning(chain(40), 10, 1e6)
    process, folder = planning._process, planning._folder
    del planning
    gc.collect()
    assert process.poll() is not None
    assert not folder.exists()


def test_plans_keep_no_storage_alive() -> None:
    """No tensor and no storage outlives its step because of a plan."""
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    training = Training()

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(weakref.ref(output.untyped_storage()))

    training.model.layers[2].register_forward_hook(watch)
    gc.collect()
    gc.disable()
    try:
        with rekindle.budget(budget_of(), learn="wait") as run:
            six(training)
            assert run.steps_followed == 3
            del run
    finally:
        gc.enable()
    assert len(seen) == 6
    assert all(storage() is None for storage in seen)


@pytest.mark.slow
def test_bookkeeping_is_flat_over_many_steps() -> None:
    from tests.pytorch.online.test_rules_leaks import entries

    training = Training()
    with rekindle.budget(budget_of(), learn="wait") as run:
        counts = []
        for number in range(30):
            training.step(number)
            training.losses.clear()  # each would keep what it is computed from
            counts.append(entries(run))
        assert run.steps_followed == 27
    assert len(set(counts[6:])) == 1


def test_number_of_plans_is_limited() -> None:
    plans = plans_for(1, torch.device("cpu"))
    for number in range(3 * MOST_PLANS):
        other = StepPlan([GRAPH] * (number + 1), [], [], None)
        plans.over(other.met, other)
    assert len(plans.shapes) <= MOST_PLANS
    for number in range(3 * MOST_PLANS):
        plans_for(2 + number, torch.device("cpu"))
    assert len(_step_plans._plans) <= MOST_PLANS


def test_recording_of_ever_different_steps_is_given_up() -> None:
    plans = plans_for(1, torch.device("cpu"))
    written = 0
    for number in range(1000):
        met = [number << 2 | GRAPH]
        wanted = plans.wants_more()
        written += wanted
        plans.over(met, StepPlan(met, [], [], None) if wanted else None)
    assert 0 < written < 50


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_models_train_the_same(case: Case) -> None:
    """Three steps until there is a plan, three along it, against six without a budget."""
    plain = case.build()
    losses = [loss for number in range(6) for loss in plain.step(number)]
    expected = {name: value.clone() for name, value in everything(plain, losses).items()}
    budget = plainly(case).measured.budget(0.5)
    while True:
        workload, tracker = case.build(), Tracker(resized=True)
        try:
            with tracker, rekindle.budget(budget, learn="wait") as run:
                losses = [loss for number in range(6) for loss in workload.step(number)]
        except rekindle.OutOfBudget as error:
            budget = error.smallest_budget
        else:
            break
    assert tracker.peak <= budget
    assert differing(everything(workload, losses), expected) == []
    if case.name in ("gpt", "densenet", "unet", "lstm"):  # the others are never the same again
        assert run.steps_followed >= 3


def test_changed_budget_learns_other_plans() -> None:
    less, more = budget_of(), budget_of(0.7)

    def steps(training: Training, run: Run) -> None:
        six(training)
        learned = run.steps_followed
        assert learned > 0
        run.budget = more
        training.step(6)
        assert run.steps_followed == learned  # nothing was learned of that yet
        for number in range(7, 12):
            training.step(number)
        assert run.steps_followed > learned

    plain = Training()
    for number in range(12):
        plain.step(number)
    expected = plain.left_behind()
    training = Training()
    with rekindle.budget(less, learn="wait") as run:
        steps(training, run)
    assert all(map(torch.equal, training.left_behind(), expected))
    assert less < run.peak <= more
