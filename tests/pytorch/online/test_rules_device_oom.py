"""Tests of a budget that is larger than the free memory of the device, simulated on the CPU.

If the device runs out of memory, Rekindle lowers the budget to the memory that fitted.
"""

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
    """Simulate that the device had memory for only `nbytes` bytes of the budget."""
    run._driver.core.fitted(run._driver.handle, nbytes)


def test_budget_is_lowered_to_memory_that_device_provided() -> None:
    weight = vector(requires_grad=True)
    wanted = _gradient(weight)
    with rekindle.budget("1MiB") as run:
        _gradient(weight)
        assert run.evictions == 0
        _fitted(run, 12 * VECTOR)
        assert torch.equal(_gradient(weight), wanted)
        assert run.evictions > 0
        assert run._driver.backoff.budget == 12 * VECTOR
        assert run.budget == 2**20  # `run.budget` stays the amount that the program set
        run._driver.steps.forget_peak()
        _gradient(weight)
        assert run.peak <= 12 * VECTOR
    (reported,) = (each for each in run.report().advice if "The device ran out of memory" in each)
    assert "ran out of memory 1 time before" in reported
    assert "lowered the budget to 46.9 KiB" in reported


def test_budget_is_not_lowered_to_a_few_vectors_after_device_oom() -> None:
    weight = vector(requires_grad=True)
    wanted = _gradient(weight)
    with rekindle.budget("1MiB") as run:
        _gradient(weight)
        _fitted(run, 2 * VECTOR)
        assert torch.equal(_gradient(weight), wanted)
        assert run._driver.backoff.budget == 2**20


def test_budget_is_not_lowered_below_memory_for_recomputation() -> None:
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
        _fitted(run, run.memory)  # exactly the bytes in use fit
        (gradient,) = torch.autograd.grad(loss, [weight])
        assert run._driver.backoff.budget == 2**20
        assert run.recomputations > 0
    assert torch.equal(gradient, wanted)


def test_run_budget_assigned_after_device_oom_is_used() -> None:
    weight = vector(requires_grad=True)
    with rekindle.budget("1MiB") as run:
        _gradient(weight)
        _fitted(run, 12 * VECTOR)
        run.budget = "2MiB"
        assert run._driver.backoff.budget == 2**21
        _gradient(weight)
    assert run.evictions == 0
