"""The program whose calls `rekindle build --guided` counts: it trains three small models.

The models run many small operators, within budgets in which the native core does all of its work:
without evictions, with evictions that its policy chooses, and with a learned plan.
"""

# pyright: standard
# (strict mode reports too many unknown types in torch's stubs)
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.pytorch import budget as within

_STEPS = 40  # in each budget
_AMPLE = 2**40  # a budget (bytes) in which the core soon only counts operators
_ITEMS = 24  # number of items of a sequence, each of which the cell of the first model reads
_WIDTH = 64


class _Recurrent(nn.Module):
    """An LSTM cell in a loop over the items of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(_WIDTH, _WIDTH)

    def forward(self, items: Tensor) -> Tensor:
        hidden = cell = torch.zeros(items.shape[1], _WIDTH)
        for item in items:
            hidden, cell = self.cell(item, (hidden, cell))
        return hidden


class _Block(nn.Module):
    """A block of a transformer: attention and a feed-forward network, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.heads = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.network = nn.Sequential(
            nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.heads(self.norms[0](x)).chunk(3, dim=-1)
        )
        weights = (query @ key.transpose(-1, -2) / 4).softmax(dim=-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.network(self.norms[1](x))


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 16), (16, 16)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Train the model by one step, and evaluate it."""
    loss = functional.smooth_l1_loss(model(batch), torch.zeros(()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(batch)


def _programs() -> Iterator[Callable[[], None]]:
    """Yield functions that train a new model by one step."""
    for model, batch, fused in (
        (_Recurrent(), torch.randn(_ITEMS, 8, _WIDTH), False),
        (nn.Sequential(*(_Block() for _ in range(4))), torch.randn(4, 32, _WIDTH), True),
        (_convolutional(), torch.randn(8, 3, 24, 24), False),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        yield partial(_step, model, batch, optimizer)


def main() -> None:
    """Train each model within several budgets."""
    warnings.simplefilter("ignore")  # about sizes of operands, and about budgets that are tight
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for step in _programs():
        with within.unlimited() as run:
            for _ in range(_STEPS):
                step()
        tight = run.memory + 7 * (run.peak - run.memory) // 10
        for context in (
            within(_AMPLE, learn=False),
            within(tight, learn=False),
            within(tight, learn="wait"),
        ):
            with context:
                for _ in range(_STEPS):
                    step()


if __name__ == "__main__":
    main()
