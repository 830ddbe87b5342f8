"""Tests of assigning `run.budget`, which changes the amount of a budget during a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rekindle
from tests.pytorch.harsh import WIDTH, vector

VECTOR = 4 * WIDTH
DEPTH = 10


def _chain(weight: Tensor) -> Tensor:
    x = weight
    for _ in range(DEPTH):
        x = x.sin()
    return x.sum()


def _gradient(weight: Tensor) -> Tensor:
    return torch.autograd.grad(_chain(weight), [weight])[0]


def test_raising_run_budget_ends_evictions() -> None:
    weight = vector(requires_grad=True)
    wanted = _gradient(weight)
    with rekindle.budget(6 * VECTOR) as run:
        assert torch.equal(_gradient(weight), wanted)
        evictions = run.evictions
        assert evictions > 0
        run.budget = "1MiB"
        assert run.budget == 2**20
        assert torch.equal(_gradient(weight), wanted)
    assert run.evictions == evictions
    assert run.peak > 6 * VECTOR
    assert "of 1.0 MiB" in run.status()


def test_lowering_run_budget_evicts_excess_at_once() -> None:
    weight = vector(requires_grad=True)
    wanted = _gradient(weight)
    with rekindle.budget("1MiB", record=True) as run:
        loss = _chain(weight)
        assert run.evictions == 0
        run.budget = 7 * VECTOR
        assert run.evictions > 0
        assert run.memory <= 7 * VECTOR
        assert torch.equal(torch.autograd.grad(loss, [weight])[0], wanted)
        del loss
    assert run.record.budget == 2**20  # the largest amount that the budget had
    assert run.record.peak <= 2**20


def test_lowering_run_budget_below_pinned_memory_is_refused() -> None:
    weight = vector(requires_grad=True)
    with rekindle.budget("1MiB", evict="saved") as run:
        kept = [vector() * 2 for _ in range(3)]
        with pytest.raises(rekindle.OutOfBudget, match=r"run\.budget"):
            run.budget = VECTOR
        assert run.budget == 2**20
        _gradient(weight)
        del kept
    with pytest.raises(rekindle.InvalidBudget, match=r"run\.budget = 'much': got text"):
        run.budget = "much"


def test_assigning_run_budget_of_unlimited_run_is_refused() -> None:
    refused = pytest.raises(rekindle.Unsupported, match="no budget to change")
    with rekindle.budget.unlimited() as run, refused:
        run.budget = "1GiB"
    assert run.budget is None
