"""Tests of learned plans, which a budget makes from earlier training steps that repeat.

A plan decides which values are evicted and recomputed, and changes no results. Tests wait until
planning has finished. In most tests a simulated run stands in for the search for a plan.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import Run
from rekindle.pytorch.learned import _step_plans
from rekindle.pytorch.learned._background import Planning
from rekindle.pytorch.learned._step_plan import GRAPH, StepPlan
from rekindle.pytorch.learned._step_plans import MOST_PLANS, StepPlans, plans_for
from rekindle.schedule import verify
from rekindle.trace import chain
from tests.differ.judge import smallest
from tests.helpers import sampled
from tests.pytorch.bits import differing
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.plans import forget_plans
from tests.pytorch.test_models import left_by, plainly
from tests.pytorch.tracker import Measured, Tracker, measure

WIDTH, BATCH = 64, 128


class Deep(nn.Module):
    """Layers with dropout, a batch norm and an in-place activation.

    With `depth`, the forward pass runs only the first `depth` layers.
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
    """A model with its optimizer, and their state after some steps."""

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
    """Assert that `steps` with learned plans leave the same state as in plain PyTorch."""
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
def test_learned_plan_is_made_in_another_process() -> None:
    training = Training()
    with rekindle.budget(budget_of(), learn="wait") as run:
        for number in range(4):
            training.step(number)
    assert (run.steps_followed, run.steps_left) == (1, 0)
    (shape,) = learned(run).shapes
    assert shape.route is not None
    assert 0 <= shape.route.bound_ns <= shape.route.recompute_ns > 0


@pytest.mark.usefixtures("for_real")
def test_plan_is_followed_if_step_holds_values_past_its_end() -> None:
    """The program still holds the batch and the loss when the optimizer's step ends the step."""
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


def test_program_follows_learned_plan_from_fourth_step_on() -> None:
    run = assert_alike(six, budget_of())
    assert (run.steps_followed, run.steps_left) == (3, 0)
    assert "3   followed to the end, 0 abandoned" in str(run.report())


def test_record_of_planned_steps_passes_verifier() -> None:
    run = assert_alike(six, budget_of(), record=True)
    assert run.steps_followed == 3
    cost = verify(run.trace, run.record.schedule, run.budget)
    assert (cost.recompute_ns, cost.peak) == (run.recompute_ns, run.peak)


def test_step_with_plan_recomputes_at_most_planned_values() -> None:
    training = Training()
    with rekindle.budget(budget_of(), learn="wait") as run:
        for number in range(3):
            training.step(number)
            training.losses.clear()  # the plan does not include memory of losses of earlier steps
        before = run.recomputations
        training.step(3)
        (shape,) = learned(run).shapes
        assert shape.route is not None
        assert run.steps_followed == 1
        # Numbers of recomputations are compared, because times are still inexact in first steps.
        assert run.recomputations - before <= len(shape.route.restores)


def test_step_that_differs_from_plan_abandons_it() -> None:
    def steps(training: Training) -> None:
        for number in range(8):
            training.step(number, depth=5 if number == 4 else None)

    run = assert_alike(steps, budget_of(steps=steps))
    assert (run.steps_followed, run.steps_left) == (4, 1)
    assert "of the step was" in str(run.report())


def test_each_batch_length_gets_its_own_learned_plan() -> None:
    def steps(training: Training) -> None:
        for number in range(12):
            training.step(number, batch=(BATCH, BATCH - 32)[number % 2])

    run = assert_alike(steps, budget_of(0.4, steps))
    shapes = learned(run).shapes
    assert len([shape for shape in shapes if shape.route is not None]) == 2
    assert run.steps_followed >= 4
    assert run.steps_left <= 2  # until both kinds of steps have a plan


def test_alternating_steps_of_two_kinds_follow_their_plans() -> None:
    def steps(training: Training) -> None:
        for number in range(14):
            training.step(number, depth=(None, 6)[number % 2])

    run = assert_alike(steps, budget_of(0.4, steps))
    assert run.steps_followed >= 4
    assert run.steps_left <= 2  # until both kinds of steps have a plan


def test_learned_plans_are_shared_between_equal_budgets() -> None:
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


def test_next_step_after_exception_follows_learned_plan() -> None:
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
    assert run.steps_left == 0  # the failed step is repeated, and then follows the plan
    assert run.steps_followed == 5


def test_out_of_budget_in_step_with_plan_reaches_program() -> None:
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


def test_budget_with_learn_false_makes_no_plan() -> None:
    training = Training()
    with rekindle.budget(budget_of(), learn=False) as run:
        six(training)
    assert run.recomputations > 0
    assert run._driver.watcher is None
    assert run.wait_for_plan(0.0)
    assert run.steps_followed == run.steps_left == 0
    assert "steps planned" not in str(run.report())


def test_budget_without_evictions_learns_no_plan() -> None:
    training = Training()
    with rekindle.budget(budget_of(1.5), learn="wait") as run:
        six(training)
    assert run.evictions == 0
    assert learned(run).shapes == []


@pytest.mark.usefixtures("for_real")
def test_failed_planning_adds_note_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.pytorch.learned._background.MODULE", "rekindle.no_such_module")
    run = assert_alike(six, budget_of())
    assert run.steps_followed == 0
    assert "no_such_module" in str(run.report())


@pytest.mark.usefixtures("for_real")
def test_training_continues_while_other_process_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_step_plans, "SECONDS", 1e6)
    training = Training()
    with rekindle.budget(budget_of(), learn=True) as run:
        six(training)
        assert not run.wait_for_plan(0.0)
        (_, planning, _) = learned(run)._planning or pytest.fail("no plan")
        process = planning._process
        forget_plans()
        assert process.poll() is not None
        assert planning._plans.closed


@pytest.mark.usefixtures("for_real")
def test_frozen_executable_starts_no_planning_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.frozen", True, raising=False)
    run = assert_alike(six, budget_of())
    assert run.steps_followed == 0
    assert "the planning process cannot be started" in str(run.report())


def test_planning_process_ends_with_training_process() -> None:
    planning = Planning(chain(40), 10, 1e6)
    process, plans = planning._process, planning._plans
    del planning
    gc.collect()
    assert process.poll() is not None
    assert plans.closed


def test_planning_process_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that is ended by a signal or by `os._exit` cannot remove files."""
    pytest.importorskip("highspy")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    planning = Planning(chain(6, nbytes=1000), 8000, 1e3)
    assert list(folder.iterdir()) == []
    assert planning.wait(None)
    route = planning.newest()
    assert route is not None, planning.error()
    assert len(route.moves) > 0
    assert planning.newest() is None
    planning.stop()


def test_learned_plan_keeps_no_storage_alive_after_its_step() -> None:
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
def test_learning_for_many_steps_does_not_grow_bookkeeping() -> None:
    from tests.pytorch.online.test_rules_leaks import entries

    training = Training()
    with rekindle.budget(budget_of(), learn="wait") as run:
        counts = []
        for number in range(30):
            training.step(number)
            training.losses.clear()  # bookkeeping of a loss grows with the values it depends on
            counts.append(entries(run))
        assert run.steps_followed == 27
    assert len(set(counts[6:])) == 1


def test_number_of_learned_plans_never_exceeds_limit() -> None:
    plans = plans_for(1, torch.device("cpu"))
    for number in range(3 * MOST_PLANS):
        other = StepPlan([GRAPH] * (number + 1), [], [], None)
        plans.over(other.op_ids, other)
    assert len(plans.shapes) <= MOST_PLANS
    for number in range(3 * MOST_PLANS):
        plans_for(2 + number, torch.device("cpu"))
    assert len(_step_plans._plans) <= MOST_PLANS


def test_recording_stops_if_no_step_repeats() -> None:
    plans = plans_for(1, torch.device("cpu"))
    written = 0
    for number in range(1000):
        met = [number << 2 | GRAPH]
        wanted = plans.wants_more()
        written += wanted
        plans.over(met, StepPlan(met, [], [], None) if wanted else None)
    assert 0 < written < 50


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(ALL_CASES, 4), ids=lambda case: case.name)
def test_models_with_learned_plans_match_pytorch(case: Case) -> None:
    """Three steps without a plan and three with a plan equal six steps without a budget."""
    plain = case.build()
    losses = [loss for number in range(6) for loss in plain.step(number)]
    expected = left_by(plain, losses)

    def attempt(budget: int) -> tuple[dict[str, Any], Run]:
        workload, tracker = case.build(), Tracker(resized=True)
        with tracker, rekindle.budget(budget, learn="wait") as run:
            losses = [loss for number in range(6) for loss in workload.step(number)]
        assert tracker.peak <= budget
        return left_by(workload, losses), run

    (left, run), *_ = smallest(attempt, plainly(case).measured.budget(0.5))
    assert differing(left, expected) == []
    if case.name in ("gpt", "densenet", "unet", "lstm"):  # the other models have no repeating steps
        assert run.steps_followed >= 3


def test_changing_run_budget_learns_new_plans() -> None:
    less, more = budget_of(), budget_of(0.7)

    def steps(training: Training, run: Run) -> None:
        six(training)
        learned = run.steps_followed
        assert learned > 0
        run.budget = more
        training.step(6)
        assert run.steps_followed == learned  # there is no plan for that budget yet
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
