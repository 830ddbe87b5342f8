"""Tests that a workspace measured within one budget is known to later budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rekindle
from rekindle.pytorch import Run
from rekindle.pytorch.native import core, why_not
from tests.pytorch import cores
from tests.pytorch.allocations import allocated

SIZE = 100_000  # floats of most vectors here
VECTOR = 4 * SIZE


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    module: Any = core()
    if module is None:
        pytest.skip(f"no native core: {why_not()}")
    if not module.count_allocations():
        pytest.skip("another allocator insists on being the one")
    cores.forget_signatures()
    yield
    cores.forget_signatures()


@torch.library.custom_op("native_workspaces::wide", mutates_args=(), device_types="cpu")
def _wide(x: Tensor) -> Tensor:
    """Takes four times as much as it makes, and gives it back."""
    workspace = x.new_empty(4 * x.numel())
    y = torch.sin(x)
    del workspace
    return y


_wide.register_fake(torch.empty_like)


def within(budget: int, step: Callable[[], object]) -> tuple[int, Run]:
    """Return the most that the allocator gave out at once, and the run."""
    runs: list[Run] = []

    def run() -> None:
        with rekindle.budget(budget, learn=False) as run:
            step()
        runs.append(run)

    return allocated(run).peak, runs[0]


def test_workspace_of_a_kind_is_known_to_the_next_budget() -> None:
    """Another size, so that it is its first call: there is something to evict for it."""
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


def test_workspace_of_a_convolution_is_known_to_the_next_budget() -> None:
    """The same call in the next budget stays within that, or is refused before it runs."""
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
