"""Build the stack of blocks and its batches that most device programs train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.on_device.machine import Machine


def training(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: Any = None, scaler: Any = None
) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model, and a function that makes one training step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        if scaler is None:
            loss().backward()
            optimizer.step()
            return
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step


def blocks(machine: Machine, *, dropout: float = 0.1) -> nn.Sequential:
    width = machine.size(512, 32)
    layers = (
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Dropout(dropout))
        for _ in range(6)
    )
    return nn.Sequential(*layers).to(machine.kind)


def batch(machine: Machine, device: str | None = None) -> Tensor:
    return torch.randn(machine.size(2048, 64), machine.size(512, 32), device=device or machine.kind)
