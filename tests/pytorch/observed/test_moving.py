"""Tests of `rekindle.profile` and `rekindle.max_batch` with `swap=`: state moves to the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.pytorch.context import _ahead
from rekindle.pytorch.online import _explain
from rekindle.pytorch.online._budget_history import BudgetHistory
from rekindle.report import Report
from tests.helpers import name_of
from tests.pytorch.bits import differing, everything
from tests.pytorch.observed.moved import (
    OPTIMIZERS_THAT_MOVE,
    PROGRAMS,
    Program,
    layers_of_equal_size,
    step_of,
    trained,
)


@pytest.mark.parametrize("optimizer", OPTIMIZERS_THAT_MOVE)
@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_profiled_budget_suffices_if_state_moves(
    program: Program, optimizer: str, tmp_path: Path
) -> None:
    _, step = step_of(program, optimizer)
    profile = rekindle.profile(step, repeats=1, swap="1GiB", swap_directory=tmp_path)
    budget = profile.smallest_budget
    assert trained(program, optimizer, budget, tmp_path).peak <= budget < 0.75 * profile.peak
    with pytest.raises(rekindle.OutOfBudget):
        trained(program, optimizer, int(budget / 1.25), tmp_path)
    budgets = [choice.budget for choice in profile.curve]
    times = [choice.step_ns for choice in profile.curve]
    assert budgets == sorted(budgets, reverse=True)
    assert times == sorted(times)
    assert profile.curve[-1].host > 0
    assert profile.curve[-1].copied > profile.curve[0].copied


def test_profile_with_swap_restores_weights_and_state(tmp_path: Path) -> None:
    model, step = step_of(layers_of_equal_size, "adamw-loop")
    step()
    other, same_step = step_of(layers_of_equal_size, "adamw-loop")
    same_step()
    before = everything(model.state_dict())
    rekindle.profile(step, repeats=1, swap="1GiB", swap_directory=tmp_path)
    assert differing(everything(model.state_dict()), before) == []
    step()
    same_step()
    assert differing(everything(model), everything(other)) == []


def test_profile_with_swap_restores_weights_of_unused_experts(tmp_path: Path) -> None:
    """The first steps use one expert, and steps whose state moves the other one."""
    experts = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    batch, calls = torch.randn(8, 64), [0]

    def step() -> None:
        calls[0] += 1
        optimizer.zero_grad()
        experts[calls[0] > 6](batch).sum().backward()
        optimizer.step()

    before = everything(experts.state_dict())
    rekindle.profile(step, repeats=1, swap="1GiB", swap_directory=tmp_path)
    assert calls[0] > 8
    assert differing(everything(experts.state_dict()), before) == []


def test_profile_with_swap_shows_line_that_works(tmp_path: Path) -> None:
    _, step = step_of(layers_of_equal_size, "adamw-loop")
    profile = rekindle.profile(step, repeats=1, swap="1GiB", swap_directory=tmp_path)
    (line,) = [line for line in profile.report.advice if line.startswith("The step fits into")]
    assert "on the host" in line
    with eval(line.rpartition("the time: ")[2], {"rekindle": rekindle}) as run:
        step()
    assert run.peak <= run.budget == profile.smallest_budget
    assert "measured time of a step within a budget:" in str(profile)
    assert Report.from_json(profile.to_json()).choices == profile.curve
    assert json.loads(profile.to_json())["choices"][-1]["host"] == profile.curve[-1].host


@pytest.mark.parametrize("options", [{"budget": "1MiB"}, {"repeats": 0}])
def test_profile_with_swap_of_one_run_is_refused(options: dict[str, Any]) -> None:
    _, step = step_of(layers_of_equal_size, "sgd")
    with pytest.raises(rekindle.Unsupported, match=r"Leave out (budget|repeats)="):
        rekindle.profile(step, swap="1GiB", **options)


def test_budgets_that_profile_tries_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remembered: list[object] = []
    monkeypatch.setattr(BudgetHistory, "_keep", lambda history: remembered.append(history))
    _, step = step_of(layers_of_equal_size, "adamw-loop")
    rekindle.profile(step, repeats=1, swap="1GiB", swap_directory=tmp_path)
    assert remembered == []
    fresh = BudgetHistory()  # no budget was too small before
    monkeypatch.setattr(_explain, "too_small", fresh)
    monkeypatch.setattr(_ahead, "too_small", fresh)
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget("100KiB"):
        step()
    assert len(remembered) == 1


def wide_step() -> Callable[[int], Callable[[], object]]:
    """Return a function from a batch size to a step. Weights and state take 1.9 MiB."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(10)])
    optimizer = torch.optim.AdamW(model.parameters())

    def step_of_batch(size: int) -> Callable[[], object]:
        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(size, 128)).square().mean().backward()
            optimizer.step()

        return step

    return step_of_batch


def test_max_batch_with_swap_fits_below_state(tmp_path: Path) -> None:
    steps = wide_step()
    with pytest.raises(rekindle.OutOfBudget):
        rekindle.max_batch(steps, budget="800KiB", at_most=4_096)
    found = rekindle.max_batch(
        steps, budget="800KiB", at_most=4_096, swap="1GiB", swap_directory=tmp_path
    )
    assert 64 <= found < 4_096
    with rekindle.budget("800KiB", evict="anything", swap="1GiB", swap_directory=tmp_path) as run:
        steps(found)()
    assert run.peak <= 800 << 10


def test_max_batch_with_swap_counts_waiting_as_slowdown(tmp_path: Path) -> None:
    found = rekindle.max_batch(
        wide_step(), budget="800KiB", at_most=8, swap="1GiB", swap_directory=tmp_path
    )
    assert found.slowdown > 1


def test_simulated_max_batch_with_swap_is_refused() -> None:
    with pytest.raises(rekindle.Unsupported, match="leave out simulated= or swap="):
        rekindle.max_batch(wide_step(), budget="800KiB", simulated=True, swap="1GiB")
