"""The models whose memory and speed are measured, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.on_device.blocks import training
from tests.on_device.machine import Machine
from tests.pytorch import networks


def bert(machine: Machine, *, large: bool = False) -> nn.Module:
    width, layers = (1024, 24) if large else (768, 12)
    with torch.device(machine.kind):
        return networks.Encoder(
            vocabulary=machine.size(30522, 50),
            width=machine.size(width, 32),
            layers=machine.size(layers, 3),
            context=512,
        )


def gpt2(machine: Machine) -> nn.Module:
    with torch.device(machine.kind):
        return networks.GPT(
            vocabulary=machine.size(50257, 50),
            width=machine.size(768, 32),
            heads=machine.size(12, 2),
            layers=machine.size(12, 3),
            context=1024,
        )


def resnet50(machine: Machine) -> nn.Module:
    with torch.device(machine.kind):
        return networks.ResNet50(width=machine.size(64, 8), classes=1000)


def language(
    machine: Machine, model: nn.Module, rows: int, time: int, *, bf16: bool = False
) -> tuple[nn.Module, Callable[[], None]]:
    """Return a function that trains `model` on sequences of random tokens."""
    model.to(machine.kind)
    words = next(iter(model.parameters())).shape[0]
    if hasattr(model, "tokens"):
        words = model.tokens.weight.shape[0]  # type: ignore[union-attr]
    time = machine.size(time, 16)

    def loss() -> Tensor:
        tokens = torch.randint(words, (rows, time), device=machine.kind)
        with torch.autocast(machine.kind, torch.bfloat16, enabled=bf16):
            out = model(tokens)
        return F.cross_entropy(out.float().flatten(0, 1), tokens.flatten())

    return training(model, loss)


def bert_base(machine: Machine, rows: int = 16) -> Any:
    return language(machine, bert(machine), machine.size(rows, 4), 512)


def resnet(machine: Machine) -> Any:
    model = networks.ResNet(width=machine.size(64, 8), depths=(3, 4, 6, 3), classes=100)
    model.to(machine.kind)
    size = machine.size(128, 16)

    def loss() -> Tensor:
        images = torch.randn(machine.size(64, 4), 3, size, size, device=machine.kind)
        return model(images).square().mean()

    return training(model, loss)


def unet(machine: Machine) -> Any:
    model = networks.UNet(width=machine.size(64, 8), levels=3).to(machine.kind)
    size = machine.size(256, 24)

    def loss() -> Tensor:
        pixels = torch.randn(machine.size(16, 2), 1, size, size, device=machine.kind)
        return model(pixels).square().mean()

    return training(model, loss)


def vision(
    machine: Machine, model: nn.Module, rows: int, size: int, *, bf16: bool = False
) -> tuple[nn.Module, Callable[[], None]]:
    """Return a function that trains `model` to classify random images of `size` pixels."""
    size = machine.size(size, 16)

    def loss() -> Tensor:
        images = torch.randn(rows, 3, size, size, device=machine.kind)
        classes = torch.randint(1000, (rows,), device=machine.kind)
        with torch.autocast(machine.kind, torch.bfloat16, enabled=bf16):
            out = model(images)
        return F.cross_entropy(out.float(), classes)

    return training(model, loss)


@final
@dataclass(frozen=True)
class Workload:
    """A model whose speed is measured.

    Attributes:
        model: Makes the model.
        train: Makes its training step, from the model, the batch size and the size of a sample.
        rows: A batch size that fits in plain PyTorch.
        size: The length of a sequence, or the pixels of an image's side.
        times: The factor of the larger batch.
        short: The size of a sample for which the host's time decides.
    """

    model: Callable[[Machine], nn.Module]
    train: Callable[..., tuple[nn.Module, Callable[[], None]]]
    rows: int
    size: int
    times: int
    short: int = 128


#: The factors of the language models are those that the authors of DTR published.
SPEED = {
    "BERT-base": Workload(bert, language, 16, 512, 2),
    "BERT-large": Workload(partial(bert, large=True), language, 8, 512, 2),
    "GPT-2": Workload(gpt2, language, 8, 1024, 3),
    "ResNet-50": Workload(resnet50, vision, 128, 224, 2, short=32),
}
