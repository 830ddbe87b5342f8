"""Tests that need a CUDA device; `test_on_standin` has those that do not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rekindle


def train_on_device() -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and weights of three steps."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*blocks).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4096, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def train_plainly() -> tuple[list[float], list[torch.Tensor], int]:
    """Train without a budget; return the results and half of the peak, and reset the peak."""
    torch.cuda.init()
    train_on_device()  # cuBLAS allocates its workspace on first use
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses, weights = train_on_device()
    budget = base + (torch.cuda.max_memory_allocated() - base) // 2
    torch.cuda.reset_peak_memory_stats()
    return losses, weights, budget


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_cuda_within_half_the_memory_matches_pytorch() -> None:
    wanted, weights, budget = train_plainly()
    with rekindle.budget(budget, device="cuda") as run:
        got, same = train_on_device()
    assert run.recomputations > 0
    assert got == wanted
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    assert torch.cuda.max_memory_allocated() <= budget
