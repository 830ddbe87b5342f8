"""Tests of `rekindle.profile`: its figures are correct, and it does not change the program."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle._predict import _on_noise
from rekindle.cli import _demo_training as demo
from rekindle.pytorch.observed._before import Undo
from rekindle.pytorch.observed._bookkeeping import prices
from rekindle.pytorch.observed._phases import Phases
from rekindle.report import Choice, Profile
from tests.helpers import sampled
from tests.pytorch import cores
from tests.pytorch.models import ALL_CASES, Case
from tests.pytorch.tracker import Tracker, measure


def gpt(layers: int) -> Callable[[], None]:
    """Return a step of the demo's GPT that always uses the same batch."""
    settings = demo.Settings(layers=layers, width=64, context=64, batch=8)
    text = demo.read_text(settings.context)
    torch.manual_seed(0)
    model = demo.GPT(settings)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        characters, following = demo.batch_of(text, settings, 0)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())
        loss.backward()
        optimizer.step()

    return step


def check(profile: Profile, peak: int) -> None:
    """Check that the tables add up to the peak, within 1 % of the peak that a tracker measured.

    Memory inside operators (workspace) is excluded, because the tracker does not see it.
    """
    at_peak = profile.at_peak
    inside = max(op.workspace for op in profile.trace.ops)
    assert 0.98 * at_peak.memory <= profile.peak <= 1.02 * (at_peak.memory + inside)
    for table in (at_peak.categories, at_peak.modules, at_peak.lines):
        assert sum(table.values()) == at_peak.memory
    assert 0.99 * peak - inside <= sum(at_peak.categories.values()) <= 1.01 * peak


def logits(rows: int, words: int) -> Callable[[], None]:
    """Return a step whose largest tensors are the logits."""
    layer, batch = nn.Linear(8, words), torch.randn(rows, 8)
    wanted = torch.randint(words, (rows,))

    def step() -> None:
        functional.cross_entropy(layer(batch), wanted).backward()
        layer.zero_grad()

    return step


@pytest.mark.parametrize("has_fused_loss", [True, False])
def test_profile_names_logits_as_reason_for_smallest_budget(
    monkeypatch: pytest.MonkeyPatch, has_fused_loss: bool
) -> None:
    remedy = "functional.linear_cross_entropy(hidden, weight, target)"
    if has_fused_loss:
        monkeypatch.setattr(functional, "linear_cross_entropy", None, raising=False)
    else:
        monkeypatch.delattr(functional, "linear_cross_entropy", raising=False)
        remedy = "a fused loss"
    step = logits(256, 3000)
    profile = rekindle.profile(step, repeats=0)
    (line,) = [line for line in profile.report.advice if "no budget can be smaller" in line]
    assert "aten::_log_softmax needs at once" in line
    assert remedy in line
    with (
        pytest.raises(rekindle.OutOfBudget, match="aten::_log_softmax") as caught,
        rekindle.budget(int(0.9 * profile.smallest_budget), split="never"),
    ):
        step()
    assert remedy in str(caught.value)


def test_profile_names_no_operator_if_none_sets_smallest_budget() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    profile = rekindle.profile(lambda: model(torch.randn(256, 64)).sum().backward(), repeats=0)
    assert "No budget can be smaller" not in "".join(profile.report.advice)


def test_profile_categories_of_demo_add_up_to_tracked_peak() -> None:
    step = gpt(4)
    profile = rekindle.profile(step, repeats=1)
    measured = measure(lambda: (step(), step(), None)[-1])
    check(profile, measured.peak)
    held = profile.at_peak.categories
    parameters = held["parameters"]
    # the two moments of AdamW
    assert held["optimizer state"] == pytest.approx(2 * parameters, rel=0.02)
    assert held["saved for backward"] > profile.peak / 2
    assert {"GPT.blocks.0.wide", "GPT.blocks.3.wide"} <= profile.at_peak.modules.keys()


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(ALL_CASES, 4), ids=lambda case: case.name)
def test_profile_categories_of_models_add_up_to_tracked_peak(case: Case) -> None:
    workload = case.build()

    def step() -> None:
        torch.manual_seed(1)  # stochastic depth changes the peak from step to step
        workload.step(0)

    profile = rekindle.profile(step, repeats=1)
    with Tracker() as tracker:
        # includes parameters of blocks that stochastic depth skipped
        tracker.count(list(workload.model.parameters()))
        for _ in range(3):
            step()
    check(profile, tracker.peak)


def test_profile_curve_ends_at_smallest_feasible_budget() -> None:
    step = gpt(3)
    profile = rekindle.profile(step, repeats=1)
    budgets = [choice.budget for choice in profile.curve]
    times = [choice.step_ns for choice in profile.curve]
    assert budgets == sorted(budgets, reverse=True)
    assert times == sorted(times)
    assert budgets[-1] == profile.smallest_budget < 0.6 * profile.peak
    assert profile.curve[0].recomputations == 0
    with rekindle.budget(profile.smallest_budget) as run:
        step()
        step()
    assert run.recomputations > 0
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(int(0.8 * profile.smallest_budget)):
        step()


@pytest.mark.slow
def test_profile_with_budget_also_reports_peak_without_budget() -> None:
    step = gpt(3)
    free = rekindle.profile(step, repeats=1)
    budget = (free.peak + free.smallest_budget) // 2
    profile = rekindle.profile(step, budget=budget, repeats=1)
    assert profile.peak <= budget
    assert profile.report.evictions > 0
    assert profile.report.recomputed
    assert profile.report.keep_all == pytest.approx(free.peak, rel=0.01)
    assert profile.smallest_budget == pytest.approx(free.smallest_budget, rel=0.05)
    with pytest.raises(rekindle.OutOfBudget):
        rekindle.profile(step, budget="100KB")
    step()  # the step runs, so no context is left open


def test_profile_with_zero_repeats_runs_script_once() -> None:
    calls: list[int] = []

    def script() -> None:
        calls.append(1)
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh())
        for _ in range(3):
            model(torch.randn(64, 32)).sum().backward()

    with cores.fixed_prices():
        profile = rekindle.profile(script, repeats=0)
    assert len(calls) == 1
    assert profile.report.plain_ns == profile.report.compute_ns > 0
    assert profile.curve[0].slowdown >= 1  # bookkeeping, which may be too short to measure
    assert profile.curve[-1].slowdown > 1


class Everything(nn.Module):
    """A program that changes weights, running statistics, a counter and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 1)
        )
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.body(x)


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    gradients = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    moments = {
        (number, name): entry.clone() if isinstance(entry, Tensor) else entry
        for number, p in enumerate(model.parameters())
        for name, entry in optimizer.state.get(p, {}).items()
    }
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    generators = (torch.get_rng_state(), random.getstate())
    return values, gradients, moments, settings, generators


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_profile_restores_model_optimizer_and_generators(trained: bool, fails: bool) -> None:
    torch.manual_seed(3)
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters())
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        optimizer.zero_grad()
        model(torch.randn(8, 16) * random.random()).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        if fails and len(calls) == 6:
            raise ZeroDivisionError

    if trained:
        step()
    before = state(model, optimizer)
    gradients = [p.grad for p in model.parameters()]
    if fails:
        with pytest.raises(ZeroDivisionError):
            rekindle.profile(step, repeats=2)
    else:
        rekindle.profile(step, repeats=1)
    assert len(calls) > 3
    assert same(before, state(model, optimizer))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), gradients, strict=True))


def test_state_comparison_detects_profile_without_restore() -> None:
    """Without restoring, the state differs after a profile.

    So `test_profile_restores_model_optimizer_and_generators` can fail.
    """
    model = Everything()
    optimizer = torch.optim.Adam(model.parameters())
    before = state(model, optimizer)
    undo = Undo()
    with undo:
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
    assert not same(before, state(model, optimizer))
    undo.restore()
    assert same(before, state(model, optimizer))


@pytest.mark.parametrize(("plain_ns", "reported"), [(3_000, True), (1_000, False)])
def test_profile_says_if_predicted_speedup_is_within_noise(plain_ns: int, reported: bool) -> None:
    """If steps within budgets seem faster than one without, other programs slowed that one down."""
    choices = tuple(Choice(100 - n, 2_000 + n, (2_000 + n) / plain_ns, n, n) for n in range(3))
    advice = _on_noise(choices, 0.4)
    assert ("such as 0.67 x, comes from noise" in "".join(advice)) is reported
    assert ("40% longer" in "".join(advice)) is reported


def test_profile_on_busy_machine_times_until_two_steps_agree() -> None:
    """A budget costs 9 % of the time here. Other programs disturb the first four measurements."""
    within = [2_200, 3_000, 2_600, 1_800, 1_100, 1_090]
    durations = iter([each for kept in within for each in (kept, 1_000)])
    now = 0
    calls = 0

    def clock() -> int:
        nonlocal now, calls
        calls += 1
        now += 0 if calls % 2 else 1_000_000 * next(durations)
        return now

    weight = torch.randn(64, 64, requires_grad=True)
    profile = rekindle.profile(lambda: weight.tanh().sum().backward(), repeats=3, clock=clock)
    assert profile.curve[0].slowdown == pytest.approx(1.09)
    assert profile.budget_for(slowdown=1.2) <= profile.peak
    assert next(durations, None) is None


def test_profile_of_phases_removes_its_optimizer_hooks() -> None:
    weight = torch.ones(100, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        weight.sin().sum().backward()
        optimizer.step()

    with rekindle.budget.unlimited() as run:
        phases = Phases(run)
        with phases.watch():
            step()
            step()
        found = phases.budgets
        step()
        assert phases._part is None  # no recording is active
    assert found
    assert phases.budgets == found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_profile_of_inference_measures_prices_with_gradients(mode: type) -> None:
    """Prices of operators are measured at the first profile of a process."""
    prices.cache_clear()
    model = nn.Linear(64, 64)
    with mode():
        profile = rekindle.profile(lambda: model(torch.ones(8, 64)), repeats=1)
    assert profile.peak > 0
