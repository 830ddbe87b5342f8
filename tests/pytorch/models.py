"""The models of the differential tests: network, data, losses, optimizers and seeds.

Two builds of a case train to equal bits on one machine, with the same number of threads.
Activations are most of the memory, and a step takes about a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from tests.pytorch.networks import (
    GAN,
    GPT,
    DenseNet,
    MixtureOfExperts,
    ResNet,
    Tree,
    TreeLSTM,
    UNet,
    UnrolledLSTM,
)

Batch = Any


@dataclass(frozen=True)
class Phase:
    """One or several backward passes, and the optimizer's step that follows."""

    losses: Callable[[Any, Batch], Tensor]
    optimizer: Optimizer
    micro_batches: int = 1
    clip: float | None = None


@dataclass(frozen=True)
class Workload:
    """The parts of a training loop; `step` is the body of that loop."""

    model: nn.Module
    data: Callable[[int], Batch]
    """The batch of step i: the same at each call, without use of the global generator."""
    phases: tuple[Phase, ...]

    def step(self, number: int) -> list[Tensor]:
        """Make one training step, and return the losses without their graph."""
        batch = self.data(number)
        losses = []
        for phase in self.phases:
            phase.optimizer.zero_grad()
            for _ in range(phase.micro_batches):
                loss = phase.losses(self.model, batch)
                (loss / phase.micro_batches).backward()
                losses.append(loss.detach())
            if phase.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), phase.clip)
            phase.optimizer.step()
        return losses


@dataclass(frozen=True)
class Case:
    """A named workload. `build` seeds the generator, so each call returns an equal workload."""

    name: str
    build_seeded: Callable[[], Workload]

    def build(self) -> Workload:
        torch.manual_seed(20)
        return self.build_seeded()


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000 + number)


def tokens(vocabulary: int, batch: int, time: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that makes the tokens of a step, the same for the same step."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (batch, time + 1), generator=generator(step))
        return text[:, :-1], text[:, 1:]

    return data


def images(batch: int, size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that makes the images and classes of a step."""

    def data(step: int) -> tuple[Tensor, Tensor]:
        g = generator(step)
        pixels = torch.randn(batch, 3, size, size, generator=g)
        return pixels, torch.randint(classes, (batch,), generator=g)

    return data


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt() -> Workload:
    model = GPT(vocabulary=64, width=64, heads=4, layers=6, context=64)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    phase = Phase(next_token_loss, optimizer, micro_batches=2, clip=1.0)
    return Workload(model, tokens(64, batch=8, time=64), (phase,))


def resnet() -> Workload:
    model = ResNet(width=16, depths=(2, 3, 2), classes=10)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return Workload(model, images(24, 32, classes=10), (Phase(class_loss, optimizer),))


def densenet() -> Workload:
    model = DenseNet(growth=12, blocks=(4, 4, 4), classes=10)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return Workload(model, images(8, 32, classes=10), (Phase(class_loss, optimizer),))


def unet(width: int = 12, batch: int = 8, height: int = 44, breadth: int = 52) -> Workload:
    """Build a U-Net with odd image sizes: by default 44 x 52, 22 x 26, 11 x 13 and 5 x 6."""
    model = UNet(width=width, levels=4)

    def data(number: int) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(batch, 1, height, breadth, generator=generator(number))
        return pixels, (F.avg_pool2d(pixels, 5, 1, 2) > 0).float()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores, mask = model(batch[0]), batch[1]
        shown = scores.sigmoid()
        overlap = (2 * (shown * mask).sum() + 1) / (shown.sum() + mask.sum() + 1)
        return F.binary_cross_entropy_with_logits(scores, mask) + 1 - overlap

    return Workload(model, data, (Phase(loss, Adam(model.parameters(), lr=1e-3)),))


def lstm() -> Workload:
    model = UnrolledLSTM(vocabulary=64, width=64, layers=2)
    phase = Phase(next_token_loss, RMSprop(model.parameters(), lr=1e-3), clip=0.5)
    return Workload(model, tokens(64, batch=32, time=48), (phase,))


def tree_lstm(width: int = 64, sentences: int = 24) -> Workload:
    model = TreeLSTM(vocabulary=100, width=width, classes=5)

    def data(number: int) -> tuple[Tree, Tensor]:
        g = generator(number)

        def draw(below: int, high: int) -> int:
            return int(torch.randint(below, high, (), generator=g))

        def tree(leaves: int) -> Tree:
            if leaves == 1:
                return Tree(words=torch.randint(100, (sentences,), generator=g))
            cuts = sorted({draw(1, leaves) for _ in range(draw(1, 4))})
            parts = [end - start for start, end in zip([0, *cuts], [*cuts, leaves], strict=True)]
            return Tree(tuple(tree(part) for part in parts))

        return tree(draw(24, 40)), torch.randint(5, (sentences,), generator=g)

    return Workload(model, data, (Phase(class_loss, Adam(model.parameters(), lr=1e-3)),))


def gan() -> Workload:
    """Train the critic with gradient penalty (Gulrajani et al., 2017), then the generator."""
    model = GAN(noise=16, width=8)

    def data(number: int) -> Tensor:
        return torch.randn(96, 1, 16, 16, generator=generator(number))

    def critic_loss(model: GAN, real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = model.generate(len(real))
        mixed = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return model.critic(fake).mean() - model.critic(real).mean() + 10 * penalty

    def generator_loss(model: GAN, real: Tensor) -> Tensor:
        return -model.critic(model.generate(len(real))).mean()

    def adam(module: nn.Module) -> Adam:
        return Adam(module.parameters(), lr=1e-4, betas=(0.5, 0.9))

    phases = (
        Phase(critic_loss, adam(model.critic)),
        Phase(generator_loss, adam(model.generator)),
    )
    return Workload(model, data, phases)


def mixture_of_experts() -> Workload:
    model = MixtureOfExperts(vocabulary=64, width=48, heads=4, layers=3, experts=4)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores, balance = model(batch[0])
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten()) + 0.01 * balance

    phase = Phase(loss, AdamW(model.parameters(), lr=1e-3))
    return Workload(model, tokens(64, batch=16, time=64), (phase,))


ALL_CASES = [
    Case("gpt", gpt),
    Case("resnet", resnet),
    Case("densenet", densenet),
    Case("unet", unet),
    Case("lstm", lstm),
    Case("tree_lstm", tree_lstm),
    Case("gan", gan),
    Case("mixture_of_experts", mixture_of_experts),
]
