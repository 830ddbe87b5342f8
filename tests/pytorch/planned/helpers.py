"""Helpers for tests of planned models: a memory tracker for compiled code, and training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.pytorch.observed._before import Onlooker as InvisibleMode
from tests.pytorch.harsh import Watch
from tests.pytorch.models import Phase

PLENTY = 1 << 40


class Onlooker(Watch, InvisibleMode):
    """A memory tracker, which is a dispatch mode but does not keep torch.compile from compiling."""


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module, losses: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.losses = losses

    def forward(self, *batch: Tensor) -> Tensor:
        return self.losses(self.model, batch)

    @staticmethod
    def of(model: nn.Module, phase: Phase) -> WithLoss:
        return WithLoss(model, phase.losses)


def training_on(batch: Callable[[int], Tensor]) -> Callable[[nn.Module], list[Tensor]]:
    """Make three steps on the first three batches, with the loss outside of the model."""

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, 0.9)
        losses = []
        for number in range(3):
            optimizer.zero_grad()
            loss = model(batch(number)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return train


def half_way(least: int, most: int) -> int:
    return (least + most) // 2
