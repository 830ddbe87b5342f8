"""Tests that a workspace (internal memory of an operator) measured in a budget is known later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rekindle
from rekindle import Run
from tests.pytorch.allocations import allocated

SIZE = 100_000  # floats in most vectors
VECTOR = 4 * SIZE


pytestmark = pytest.mark.usefixtures("workspaces_unknown")


@torch.library.custom_op("native_workspaces::wide", mutates_args=(), device_types="cpu")
def _wide(x: Tensor) -> Tensor:
    """An operator that uses four times its result as workspace, and frees it."""
    workspace = x.new_empty(4 * x.numel())
    y = torch.sin(x)
    del workspace
    return y


_wide.register_fake(torch.empty_like)


def within(budget: int, step: Callable[[], object]) -> tuple[int, Run]:
    """Return the largest number of bytes allocated at once, and the run, without slices."""
    runs: list[Run] = []

    def run() -> None:
        with rekindle.budget(budget, learn=False, split="never") as run:
            step()
        runs.append(run)

    return allocated(run).peak, runs[0]


def test_measured_workspace_is_known_to_next_budget() -> None:
    """The second budget predicts the workspace for another size, and evicts values for it."""
    first, second = torch.rand(SIZE + 100), torch.rand(SIZE, requires_grad=True)
    within(20 * VECTOR, lambda: _wide(first))

    def step() -> None:
        x = second
        for _ in range(8):
            x = (x * 0.9).sin()
        _wide(x.detach())

    budget = 8 * VECTOR
    peak, run = within(budget, step)
    assert run.evictions > 0
    assert VECTOR + peak <= budget + 1024


def test_measured_convolution_workspace_is_known_to_next_budget() -> None:
    """A smaller budget raises before the operator runs, and names the measured need exactly."""
    x, weight = torch.rand(8, 16, 32, 32), torch.rand(16, 16, 3, 3)
    there, result = x.nbytes + weight.nbytes, x.nbytes
    peak, _ = within(1 << 30, lambda: F.conv2d(x, weight, padding=1))
    inside = peak - result
    assert inside > 1024
    with pytest.raises(rekindle.OutOfBudget) as caught:
        within(there + peak - 1024, lambda: F.conv2d(x, weight, padding=1))
    assert caught.value.needed == peak
    again, _ = within(caught.value.smallest_budget, lambda: F.conv2d(x, weight, padding=1))
    assert there + again <= caught.value.smallest_budget
