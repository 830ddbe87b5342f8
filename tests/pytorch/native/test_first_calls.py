"""Tests of an operator's first call, before its workspace (internal memory) was measured.

The call stays within the budget, or raises `OutOfBudget`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from rekindle import Run
from rekindle._errors import remedy_for
from rekindle.pytorch.context import _ahead
from rekindle.pytorch.online import _explain
from rekindle.pytorch.online._budget_history import BudgetHistory
from tests.pytorch import cores
from tests.pytorch.allocations import allocated

SIZE = 100_000  # floats in most vectors
VECTOR = 4 * SIZE
ROUNDING = 1024  # Rekindle ignores smaller workspaces


pytestmark = pytest.mark.usefixtures("workspaces_unknown")


def within(
    budget: int, step: Callable[[], object], **options: Any
) -> tuple[int, Run, rekindle.OutOfBudget | None]:
    """Run `step` within a budget, each operator as a whole.

    Returns:
        The most bytes that were allocated at once, the run, and the `OutOfBudget` raised, or None.
    """
    runs: list[Run] = []
    errors: list[rekindle.OutOfBudget] = []

    def run() -> None:
        try:
            with rekindle.budget(budget, learn=False, split="never", **options) as run:
                runs.append(run)
                step()
        except rekindle.OutOfBudget as error:
            errors.append(error)

    peak = allocated(run).peak
    return peak, runs[0], errors[0] if errors else None


def saved_values(x: Tensor, count: int = 8) -> Tensor:
    for _ in range(count):
        x = (x * 0.9).sin()
    return x


def test_first_operator_call_with_too_large_workspace_is_refused() -> None:
    x, weight = torch.rand(8, 16, 32, 32), torch.rand(16, 16, 3, 3)
    there = x.nbytes + weight.nbytes
    budget = there + x.nbytes + x.nbytes // 2  # the workspace is one copy of the result
    peak, _, error = within(budget, lambda: F.conv2d(x, weight, padding=1))
    assert error is not None
    assert there + peak <= budget + ROUNDING
    assert error.operator == "aten::convolution"
    assert error.needed >= 2 * x.nbytes
    assert "needs at least" in str(error)
    assert "of it as workspace" in str(error)
    assert "torch.channels_last" in str(error)


def convolutions() -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 1, 5)
    )
    x = torch.rand(8, 1, 32, 32)
    return lambda: model(x).square().mean().backward()


def half_precision() -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).bfloat16()
    x = torch.rand(8, 3, 32, 32).bfloat16()
    return lambda: model(x).square().mean().backward()


def lstm() -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = nn.LSTM(64, 96, 2), torch.rand(24, 16, 64)
    return lambda: model(x)[0].square().mean().backward()


def upsampling() -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.Upsample(scale_factor=2), nn.Conv2d(16, 4, 3))
    x = torch.rand(8, 4, 32, 32)
    return lambda: model(x).square().mean().backward()


PROGRAMS = [convolutions, half_precision, lstm, upsampling]
#: The largest budget that `OutOfBudget` may suggest, as a multiple of the peak in plain PyTorch. It
#: is more than 1, because one operator makes most of that peak, and the estimate of its workspace
#: is twice the real one in half precision.
MOST_NAMED = 1.5


def follow(
    program: Callable[[], Callable[[], None]],
    fraction: float,
    suggested: Callable[[rekindle.OutOfBudget], int],
) -> tuple[int, float]:
    """Start a program within a fraction of its memory peak in plain PyTorch.

    Then start it within the budgets that errors suggest, until it runs.

    Returns:
        The number of starts, and the last budget as a fraction of the peak in plain PyTorch.
    """
    plain = allocated(program()).peak
    budget = int(fraction * plain)
    for starts in range(1, 10):
        cores.forget_signatures()
        peak, _, error = within(budget, program())
        if error is None:
            return starts, budget / plain
        assert peak <= budget + ROUNDING
        assert error.worth_trying >= error.smallest_budget > budget
        budget = suggested(error)
    raise AssertionError(f"{budget} bytes are still too small")


@pytest.fixture
def no_budget_was_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    fresh = BudgetHistory()
    for module in (_explain, _ahead):
        monkeypatch.setattr(module, "too_small", fresh)


@pytest.mark.slow
@pytest.mark.usefixtures("no_budget_was_too_small")
@pytest.mark.parametrize("fraction", [0.7, 0.9])
@pytest.mark.parametrize("program", PROGRAMS)
def test_following_budgets_that_errors_suggest_takes_3_starts(
    program: Callable[[], Callable[[], None]], fraction: float
) -> None:
    starts, share = follow(program, fraction, lambda error: error.worth_trying)
    assert starts <= 3
    assert share <= MOST_NAMED


@pytest.mark.slow
@pytest.mark.usefixtures("no_budget_was_too_small")
@pytest.mark.parametrize("fraction", [0.3, 0.5])
@pytest.mark.parametrize("program", PROGRAMS)
def test_following_rehearsed_budgets_takes_at_most_3_starts(
    program: Callable[[], Callable[[], None]], fraction: float
) -> None:
    starts, share = follow(program, fraction, lambda error: error.rehearse(seconds=200.0))
    assert starts <= 3
    assert share <= MOST_NAMED


def test_refused_first_operator_call_runs_after_evictions() -> None:
    """The core refuses memory to the operator while it runs, evicts, and runs it again."""
    weight = torch.rand(SIZE, requires_grad=True)
    plain = saved_values(weight).logsumexp(0)
    (expected,) = torch.autograd.grad(plain, weight)
    found: list[Tensor] = []

    def step() -> None:
        result = saved_values(weight).logsumexp(0)
        found.append(result.detach())
        found.extend(torch.autograd.grad(result, weight))

    budget = 8 * VECTOR
    peak, run, error = within(budget, step)
    assert error is None
    assert run.evictions > 0
    assert VECTOR + peak <= budget + ROUNDING
    assert run.peak <= budget
    assert torch.equal(found[0], plain)
    assert torch.equal(found[1], expected)


def test_refused_first_operator_call_evicts_user_held_values() -> None:
    weight = torch.rand(SIZE, requires_grad=True)
    expected = [float(saved_values(weight.detach(), count).logsumexp(0)) for count in range(1, 8)]
    found: list[float] = []

    def step() -> None:
        with torch.no_grad():
            held = [saved_values(weight, count) for count in range(1, 8)]
            found.extend(float(each.logsumexp(0)) for each in held)

    budget = 8 * VECTOR + VECTOR // 2
    peak, run, error = within(budget, step, evict="anything")
    assert error is None
    assert run.evictions > 0
    assert VECTOR + peak <= budget + ROUNDING
    assert found == expected


def test_retried_first_call_of_operator_matches_pytorch() -> None:
    x, weight = torch.rand(8, 16, 32, 32), torch.rand(16, 16, 3, 3)
    expected = F.conv2d(x, weight, padding=1)
    budget = x.nbytes + weight.nbytes + expected.nbytes + 20_000
    found: list[Tensor] = []

    def step() -> None:
        with rekindle.budget(budget, learn=False, split="never") as run:
            with pytest.raises(rekindle.OutOfBudget):
                F.conv2d(x, weight, padding=1)
            run.budget = 3 * budget
            found.append(F.conv2d(x, weight, padding=1))

    step()
    assert torch.equal(found[0], expected)


def test_error_suggests_channels_last_only_for_large_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert remedy_for("aten::convolution") == ""
    assert "channels_last" in remedy_for("aten::convolution_backward", 0.5)
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    assert "torch.backends.mkldnn.enabled = True" in remedy_for("aten::convolution", 0.5)
