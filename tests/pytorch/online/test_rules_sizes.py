"""Tests that a result too large for the budget raises, also if its size is hard to predict.

`KNOWN` has operators whose result size depends on values of their inputs, but can be predicted.
`UNKNOWN` has operators whose result size cannot be predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

import rekindle
from tests.pytorch.allocations import allocated
from tests.pytorch.tracker import Tracker

Evict = Literal["saved", "anything"]


@torch.library.custom_op("test_sizes::blow_up", mutates_args=())
def blow_up(x: Tensor) -> Tensor:
    """An operator whose result size cannot be predicted: it has no fake kernel."""
    return x.repeat(5_000)


def _interpolated() -> None:
    with torch.inference_mode():
        for scale in (1.5, 1.5, 1.5, 1.5, 3_000.0):
            torch.nn.functional.interpolate(torch.rand(1, 1, 16), scale_factor=scale)


def _dense() -> None:
    at, values = torch.tensor([[0]]), torch.ones(1)
    for length in (10, 10, 10, 10, 200_000):
        torch.sparse_coo_tensor(at, values, (length,), check_invariants=True).to_dense()


def _all_of(values: Tensor) -> None:
    torch.unique(values, return_inverse=True, return_counts=True)


KNOWN: dict[str, tuple[Callable[[], object], int]] = {
    "unique": (lambda: _all_of(torch.arange(30_000.0)), 400_000),
    "repeat_interleave": (lambda: torch.repeat_interleave(torch.tensor([50_000, 1])), 40_000),
    "bincount": (lambda: torch.bincount(torch.tensor([1, 50_000])), 40_000),
    "masked_select": (
        lambda: torch.rand(1, 2_000).masked_select(torch.ones(200, 1, dtype=torch.bool)),
        200_000,
    ),
    "index": (
        lambda: torch.rand(300, 1)[
            torch.ones(300, dtype=torch.bool), torch.zeros(200, 1, dtype=torch.long)
        ],
        20_000,
    ),
    "interpolate": (_interpolated, 50_000),
}
UNKNOWN: dict[str, tuple[Callable[[], object], int]] = {
    "to_dense": (_dense, 50_000),
    "a custom operator": (lambda: blow_up(torch.rand(10)), 50_000),
}


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("name", KNOWN)
def test_too_large_data_dependent_result_raises_before_op_runs(name: str, evict: Evict) -> None:
    program, budget = KNOWN[name]
    tracker = Tracker()
    with pytest.raises(rekindle.OutOfBudget), tracker, rekindle.budget(budget, evict=evict):
        program()
    assert tracker.peak <= budget


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("name", KNOWN)
def test_data_dependent_result_size_is_not_overestimated(name: str, evict: Evict) -> None:
    """The result's bytes, with an eighth more for inexact predictions, are enough."""
    program, _ = KNOWN[name]
    with Tracker() as tracker:
        most = allocated(program).peak
    with rekindle.budget(most * 9 // 8, evict=evict) as run:
        program()
    assert tracker.peak <= run.peak


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_too_large_result_of_unknown_size_raises_after_op_ran(name: str, evict: Evict) -> None:
    program, budget = UNKNOWN[name]
    with pytest.raises(rekindle.OutOfBudget), rekindle.budget(budget, evict=evict):
        program()


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_result_larger_than_predicted_evicts_other_values(evict: Evict) -> None:
    """A wrong prediction is no reason to fail if other values can be evicted."""
    weight = torch.rand(10_000, requires_grad=True)
    with rekindle.budget(480_000, evict=evict) as run:
        loss = weight.sin().cos().sin().cos().sin().cos().exp().sum()
        kept = blow_up(torch.rand(10))
        assert run.memory <= 480_000
        loss.backward()
    assert run.recomputations > 0
    assert kept.numel() == 50_000
