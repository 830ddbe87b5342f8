"""Tests of `rekindle.profile` where slices of operators fit into budgets that no trace predicts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import rekindle
from rekindle.cli._watched import found_by
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.observed import Phases
from rekindle.pytorch.online import _explain
from rekindle.pytorch.online._budget_history import BudgetHistory
from rekindle.report import Report
from tests.pytorch.bits import differing, everything

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")

ROWS, WORDS = 512, 4000
SCORES = 4 * ROWS * WORDS  # bytes of the scores of all words


class Counted:
    """A step that counts its calls."""

    def __init__(self, model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
        self.model = model
        self.loss = loss
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self.model.zero_grad()
        self.loss().backward()


def language_step() -> Counted:
    """Return a step whose largest tensors are the scores of all words."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WORDS, bias=False))
    x, words = torch.randn(ROWS, 64), torch.randint(WORDS, (ROWS,))
    return Counted(model, lambda: functional.cross_entropy(model(x), words))


def convolution_step() -> Counted:
    """Return a step whose largest operator cannot run in slices."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 64, 3, padding=1), torch.randn(4, 3, 64, 64)
    return Counted(model, lambda: model(x).sum())


def test_smallest_budget_of_language_model_is_below_scores() -> None:
    step = language_step()
    profile = rekindle.profile(step, repeats=1)
    simulated = [choice for choice in profile.curve if not choice.measured]
    assert simulated[-1].budget > 2 * SCORES
    assert profile.smallest_budget < 0.4 * simulated[-1].budget
    assert profile.smallest_budget == profile.curve[-1].budget
    with rekindle.budget(profile.smallest_budget) as run:
        step()
        step()
    assert run.peak <= profile.smallest_budget
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(int(0.9 * profile.smallest_budget)):
        step()


def test_profile_of_sliced_steps_is_consistent() -> None:
    profile = rekindle.profile(language_step(), repeats=1)
    budgets = [choice.budget for choice in profile.curve]
    times = [choice.step_ns for choice in profile.curve]
    assert budgets == sorted(budgets, reverse=True)
    assert times == sorted(times)
    smallest = profile.smallest_budget
    assert profile.fits(smallest)
    assert not profile.fits(smallest - 1)
    assert profile.step_ns(smallest) == times[-1]
    assert profile.budget_for(profile.curve[-1].slowdown) == smallest
    assert Report.from_json(profile.to_json()).choices == profile.curve
    text = str(profile)
    assert text.index("predicted time of a step") < text.index("measured time of a step")
    (line,) = [each for each in profile.report.advice if "run in slices" in each]
    assert "aten::mm" in line
    assert "No budget can be smaller" not in text
    assert "measured" in profile.to_html()


def test_profile_of_sliced_steps_restores_the_program() -> None:
    step, other = language_step(), language_step()
    before = everything(step.model.state_dict())
    rekindle.profile(step, repeats=1)
    assert differing(everything(step.model.state_dict()), before) == []
    step()
    other()
    assert differing(everything(step.model), everything(other.model)) == []


def test_profile_measures_few_steps_in_slices() -> None:
    step, stages = language_step(), list[str]()
    rekindle.profile(step, repeats=1, watch=stages.append)
    tried = [stage for stage in stages if "in slices" in stage]
    assert 4 <= len(tried) <= 12
    assert step.calls <= calls_without_slices() + 2 * len(tried)


def calls_without_slices() -> int:
    """Return how often a profile calls a step that no slices can help."""
    step = convolution_step()
    rekindle.profile(step, repeats=1)
    return step.calls


def test_profile_measures_no_step_that_slices_cannot_help() -> None:
    step, stages = convolution_step(), list[str]()
    profile = rekindle.profile(step, repeats=1, watch=stages.append)
    assert not [stage for stage in stages if "in slices" in stage]
    assert not any(choice.measured for choice in profile.curve)
    assert "No budget can be smaller" in str(profile)


def test_profile_of_one_run_says_that_slices_may_need_less() -> None:
    step = language_step()
    profile = rekindle.profile(step, repeats=0)
    assert step.calls == 1
    assert not any(choice.measured for choice in profile.curve)
    (line,) = [each for each in profile.report.advice if "needs at once" in each]
    assert line.startswith("Without slices, no budget can be smaller")


def test_profile_within_budget_measures_slices_too() -> None:
    step = language_step()
    profile = rekindle.profile(step, repeats=1, budget=SCORES)
    assert profile.peak <= SCORES
    assert profile.smallest_budget < SCORES


def test_error_of_sliceable_operator_names_need_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_explain, "too_small", BudgetHistory())  # no budget was too small before
    monkeypatch.setenv("REKINDLE_CACHE", "off")  # neither in another process
    step = language_step()
    with pytest.raises(rekindle.OutOfBudget) as caught, rekindle.budget("3MiB"):
        step()
    assert "as a whole" in str(caught.value)
    assert "The smallest budget" not in str(caught.value)


def test_phases_name_operator_whose_slices_may_need_less() -> None:
    with rekindle.budget(None) as run:
        phases = Phases(run)
        with phases.watch():
            language_step()()
    assert phases.sliceable == ("aten::_log_softmax",)
    assert "in slices, aten::_log_softmax may need less" in found_by(phases)


def test_phases_name_no_operator_that_has_no_slices() -> None:
    with rekindle.budget(None) as run:
        phases = Phases(run)
        with phases.watch():
            convolution_step()()
    assert phases.whole > 0
    assert phases.sliceable == ()
