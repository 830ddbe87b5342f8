"""Tests of CPU devices with an index, such as `cpu:1`: some versions of Accelerate use them."""

from __future__ import annotations

import torch

import rekindle


def _gradient() -> torch.Tensor:
    weight = torch.ones(8, 8).to(torch.device("cpu", 1)).requires_grad_()
    made = torch.zeros(8, device="cpu:1") + weight @ weight
    made.exp().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_tensors_on_indexed_cpu_device_count_in_cpu_budget() -> None:
    plain = _gradient()
    with rekindle.budget("10MiB") as run:
        within = _gradient()
    assert torch.equal(plain, within)
    assert run.peak >= 3 * 8 * 8 * 4
