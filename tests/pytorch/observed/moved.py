"""Small programs, and training in which their weights, gradients and state move to the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import rekindle
from rekindle import Run

Program = Callable[[], tuple[nn.Module, Tensor]]


class Words(nn.Module):
    """An embedding, attention, and scores of many words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1_000, 64)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 4
        )
        self.scores = nn.Linear(64, 1_000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scores(self.layers(self.words(tokens)))


def layers_of_equal_size() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[nn.Linear(128, 128) for _ in range(10)]), torch.randn(8, 128)


def large_activations() -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers), torch.randn(1_024, 64)


def convolutions() -> tuple[nn.Module, Tensor]:
    blocks = [
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        for _ in range(4)
    ]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 64, 32))
    return model, torch.randn(8, 32, 8, 8)


def words() -> tuple[nn.Module, Tensor]:
    return Words(), torch.randint(1_000, (4, 32))


PROGRAMS: list[Program] = [layers_of_equal_size, large_activations, convolutions, words]

OPTIMIZERS_THAT_MOVE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adamw-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def step_of(program: Program, optimizer: str) -> tuple[nn.Module, Callable[[], None]]:
    """Return the model of a program, and a function that takes one training step."""
    torch.manual_seed(1)
    model, batch = program()
    steps = OPTIMIZERS_THAT_MOVE[optimizer](model.parameters())

    def step() -> None:
        steps.zero_grad()
        model(batch).square().mean().backward()
        steps.step()

    return model, step


def trained(
    program: Program,
    optimizer: str,
    budget: int,
    folder: Path,
    split: Literal["equal", "never"] = "equal",
) -> Run:
    """Train for two steps within a budget in which state may move to a file in `folder`."""
    _, step = step_of(program, optimizer)
    with rekindle.budget(
        budget, evict="anything", swap="1GiB", swap_directory=folder, cache=False, split=split
    ) as run:
        step()
        step()
    return run
