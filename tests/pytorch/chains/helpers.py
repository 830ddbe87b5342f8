"""Small sequential models with special layers, for the tests of `rekindle.sequential`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.pytorch.networks import Attention, Residual

Chain = tuple[nn.Sequential, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.LayerNorm(width), Attention(width, 4, 0.1))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.mlp(x)


class Gate(nn.Module):
    """A module whose operators change from call to call: random depth, and a branch on a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        depth = int(torch.randint(1, 4, ())) if self.training else 3
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x)) * self.scale.clone() + x * (1 + int(self.calls) % 2)
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.scale.mul_(0.9).add_(x.detach().abs().mean((0, 1)), alpha=0.1)
        return x


def gpt(layers: int = 6, width: int = 64) -> Chain:
    blocks = [Block(width) for _ in range(layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64))
    return nn.Sequential(nn.Embedding(64, width), *blocks, head), torch.randint(64, (4, 64))


def resnet() -> Chain:
    layers = [
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *[Residual(16, 16, 1, 0.0) for _ in range(4)],
        Residual(16, 32, 2, 0.0),
        *[Residual(32, 32, 1, 0.0) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 10),
    ]
    return nn.Sequential(*layers), torch.randn(8, 3, 24, 24)


def mlp() -> Chain:
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(12):
        layers += [nn.Linear(128, 128), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(128, 10)), torch.randn(512, 2, 64)


def gates() -> Chain:
    return nn.Sequential(*[Gate(48) for _ in range(8)]), torch.randn(16, 32, 48)


def frozen() -> Chain:
    model, x = gpt()
    for module in [*model[:3], model[5]]:
        module.requires_grad_(False)
    return model, x


def tied() -> Chain:
    """Build a model that uses one block three times and one batch norm twice."""
    block, norm = Block(64), nn.BatchNorm1d(64)
    layers = [nn.Linear(64, 64), block, norm, Block(64), block, norm, Block(64), block]
    return nn.Sequential(*layers), torch.randn(8, 64, 64)


CHAINS: dict[str, Callable[[], Chain]] = {
    "gpt": gpt,
    "resnet": resnet,
    "mlp": mlp,
    "gates": gates,
    "frozen": frozen,
    "tied": tied,
}


def built(name: str) -> Chain:
    torch.manual_seed(11)
    return CHAINS[name]()
