"""Tests of a device with less memory than the budget, simulated without a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rekindle
from tests.pytorch.harsh import WIDTH, vector

VECTOR = 4 * WIDTH


def _gradient(weight: Tensor) -> Tensor:
    x = weight
    for _ in range(10):
        x = x.sin() * x
    return torch.autograd.grad(x.sum(), [weight])[0]


def _fitted(run: Any, nbytes: int) -> None:
    """As after an allocation that failed, and went well with so much in use."""
    run._driver.core.fitted(run._driver.handle, nbytes)


def test_budget_is_lowered_to_fitted_memory() -> None:
    weight = vector(requires_grad=True)
    wanted = _gradient(weight)
    with rekindle.budget("1MiB") as run:
        _gradient(weight)
        assert run.evictions == 0
        _fitted(run, 12 * VECTOR)
        assert torch.equal(_gradient(weight), wanted)
        assert run.evictions > 0
        assert run._driver.shortfall.budget == 12 * VECTOR
        assert run.budget == 2**20  # the amount that the program set
        run._driver.steps.forget_peak()
        _gradient(weight)
        assert run.peak <= 12 * VECTOR
    (told,) = (each for each in run.report().advice if "had no room" in each)
    assert "no room 1 time although" in told
    assert "46.9 KiB is the budget now" in told


def test_too_small_fitted_memory_does_not_lower_budget() -> None:
    weight = vector(requires_grad=True)
    wanted = _gradient(weight)
    with rekindle.budget("1MiB") as run:
        _gradient(weight)
        _fitted(run, 2 * VECTOR)
        assert torch.equal(_gradient(weight), wanted)
        assert run._driver.shortfall.budget == 2**20


def test_fitted_memory_without_room_to_recompute_is_not_used() -> None:
    weight = vector(requires_grad=True)
    x = weight.sin().exp()
    (wanted,) = torch.autograd.grad((x * x).sum(), [weight])
    with rekindle.budget("1MiB") as run:
        x = weight.sin().exp()
        loss = (x * x).sum()
        del x
        run.budget = run.memory - VECTOR
        run.budget = "1MiB"
        assert run.evictions == 1
        _fitted(run, run.memory)  # and not a byte more
        (gradient,) = torch.autograd.grad(loss, [weight])
        assert run._driver.shortfall.budget == 2**20
        assert run.recomputations > 0
    assert torch.equal(gradient, wanted)


def test_budget_set_after_shortfall_is_used() -> None:
    weight = vector(requires_grad=True)
    with rekindle.budget("1MiB") as run:
        _gradient(weight)
        _fitted(run, 12 * VECTOR)
        run.budget = "2MiB"
        assert run._driver.shortfall.budget == 2**21
        _gradient(weight)
    assert run.evictions == 0
