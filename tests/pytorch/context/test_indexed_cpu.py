"""Tests with tensors on `cpu:1`, which some versions of Accelerate give to CPU ranks."""

from __future__ import annotations

import torch

import rekindle


def _gradient() -> torch.Tensor:
    weight = torch.ones(8, 8).to(torch.device("cpu", 1)).requires_grad_()
    made = torch.zeros(8, device="cpu:1") + weight @ weight
    made.exp().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_cpu_with_an_index_is_the_cpu_of_the_budget() -> None:
    plain = _gradient()
    with rekindle.budget("10MiB") as run:
        within = _gradient()
    assert torch.equal(plain, within)
    assert run.peak >= 3 * 8 * 8 * 4
