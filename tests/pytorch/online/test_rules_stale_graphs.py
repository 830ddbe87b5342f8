"""Tests of an optimizer's step between two backward passes of one graph, compared with PyTorch.

With most optimizers the second pass raises, because weights that it needs have changed (R7, version
check). Fused optimizers change weights without bumping their version counters. PyTorch then
continues with saved values from before the step and weights from after it (R4, sources).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn, optim

import rekindle
from rekindle import Run
from tests.differ.judge import smallest
from tests.pytorch.bits import differing, everything

WAYS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
}
NOTICED = "one of the variables needed for gradient computation has been modified"


def _program(
    kind: Callable[..., optim.Optimizer], warm: bool
) -> Callable[[], tuple[nn.Module, str]]:
    layers = [part for _ in range(5) for part in (nn.Linear(24, 24), nn.Tanh(), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(24, 1))
    optimizer = kind(model.parameters())
    batch = torch.randn(64, 24)
    for _ in range(warm):  # so that the optimizer's first step is outside of the budget
        model(batch).sum().backward()
        optimizer.step()

    def step() -> tuple[nn.Module, str]:
        loss = model(batch).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        try:
            loss.backward()
        except rekindle.OutOfBudget:
            raise
        except RuntimeError as error:
            return model, str(error).partition(" by an inplace")[0]
        return model, "went on"

    return step


@pytest.mark.parametrize("evict", ["saved", "anything"])
@pytest.mark.parametrize("warm", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_optimizer_step_before_second_backward_matches_pytorch(
    kind: Callable[..., optim.Optimizer],
    way: str,
    warm: bool,
    evict: Literal["saved", "anything"],
) -> None:
    def build() -> Callable[[], tuple[nn.Module, str]]:
        torch.manual_seed(1)
        return _program(lambda parameters: kind(parameters, lr=0.1, **WAYS[way]), warm)

    # Not with `harshest`, whose tracker is a dispatch mode: within a mode PyTorch itself misses
    # writes of foreach steps.
    plain = build()()
    assert plain[1] == ("went on" if way == "fused" else NOTICED)

    def attempt(budget: int) -> tuple[tuple[nn.Module, str], Run]:
        step = build()
        with rekindle.budget(f"{budget}B", device="cpu", evict=evict, split="never") as run:
            return step(), run

    (result, run), *_ = smallest(attempt, 1)
    assert differing(everything(result), everything(plain)) == []
    assert run.recomputations > 0
