"""Tests of convolutions and upsampling that have no room as a whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.pytorch.native import core as native_core
from tests.on_device.machine import same
from tests.pytorch.bits import threads_set
from tests.pytorch.scenes.play import Tally

pytestmark = pytest.mark.skipif(native_core() is None, reason="no native core")


SLICED = False  #: as `SLICES_CONVOLUTIONS` in native/ops/spatial.h
if_sliced = pytest.mark.skipif(not SLICED, reason="slices of convolutions are switched off")

Step = Callable[[], list[Tensor]]


class Decoder(nn.Module):
    """Like the decoder of an autoencoder: each pair of blocks doubles the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, width, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(4)])
        self.norms = nn.ModuleList([nn.GroupNorm(8, width) for _ in range(4)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            x = x + block(functional.silu(norm(x)))
            x = functional.interpolate(x, scale_factor=2.0) if i % 2 else x
        return self.last(x)


class UNet(nn.Module):
    """Two resolutions, and a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = functional.silu(self.first(x))
        coarse = functional.interpolate(functional.silu(self.down(fine)), scale_factor=2.0)
        return self.last(torch.cat([functional.silu(self.up(coarse)), fine], 1))


def plain_model(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [nn.Conv2d(width if i else 3, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))


@dataclass(frozen=True)
class Model:
    """A model, its batch, and the smallest share of its memory without a budget that suffices."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    least: float
    trains: bool = True
    channels_last: bool = False

    def step(self) -> Step:
        torch.manual_seed(2)
        model, x = self.make(), torch.randn(self.shape)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
            x = x.contiguous(memory_format=torch.channels_last)

        def step() -> list[Tensor]:
            if not self.trains:
                with torch.no_grad():
                    return [model(x)]
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

        return step


MODELS: dict[str, Model] = {
    "decoder": Model(lambda: Decoder(32), (1, 4, 32, 32), 0.65, trains=False),
    "decoder, channels last": Model(
        lambda: Decoder(32), (1, 4, 32, 32), 0.8, trains=False, channels_last=True
    ),
    "decoder in training": Model(lambda: Decoder(32), (1, 4, 32, 32), 0.52),
    "u-net": Model(lambda: UNet(16), (4, 3, 64, 64), 0.7),
    "u-net, channels last": Model(lambda: UNet(16), (4, 3, 64, 64), 0.64, channels_last=True),
    "plain": Model(lambda: plain_model(32), (4, 3, 48, 48), 0.66),
}


@if_sliced
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", [0, 0.2, 0.4, 0.6, 0.8, 1])
@pytest.mark.usefixtures("workspaces_unknown")
def test_every_budget_above_slices_suffices(name: str, part: float) -> None:
    model = MODELS[name]
    with rekindle.budget(None, learn=False) as run:
        expected = model.step()()
    budget = int((model.least + part * (1 - model.least)) * run.peak)
    step, tally = model.step(), Tally()
    with tally.counting(), rekindle.budget(budget, learn=False, split="equal"), tally.of_a_budget():
        found = step()
    assert same(found, expected)
    assert tally.within <= budget


@dataclass(frozen=True)
class Convolution:
    """A convolution, and whether it runs in slices."""

    image: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    channels_last: bool = False
    sliced: bool = True

    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(3)
        x, weight = torch.randn(self.image), torch.randn(self.weight)
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, weight, torch.randn(self.weight[0])

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        operator = (functional.conv1d, functional.conv2d, functional.conv3d)[x.dim() - 3]
        return operator(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)


CONVOLUTIONS: dict[str, Convolution] = {
    "rows": Convolution((1, 16, 256, 96), (32, 16, 3, 3), padding=1),
    "rows without padding": Convolution((1, 24, 200, 96), (44, 24, 5, 3)),
    "rows with strides": Convolution((1, 16, 300, 96), (64, 16, 5, 5), 2, 2),
    "rows with long strides": Convolution((1, 8, 400, 90), (96, 8, 2, 2), 3, 1),
    "dilated rows": Convolution((1, 16, 256, 96), (32, 16, 3, 3), padding=2, dilation=2),
    "rows of pixels": Convolution((2, 32, 96, 64), (48, 32, 1, 1)),
    "rows with channels last": Convolution(
        (1, 16, 256, 96), (32, 16, 3, 3), padding=1, channels_last=True
    ),
    "rows of one channel": Convolution((2, 1, 200, 100), (32, 1, 3, 3), padding=1),
    "depthwise": Convolution((2, 32, 64, 40), (32, 1, 3, 3), padding=1, groups=32),
    "volume": Convolution((2, 8, 32, 24, 20), (16, 8, 3, 3, 3), padding=1),
    "sequences": Convolution((16, 16, 1000), (32, 16, 5), padding=2),
    "few elements": Convolution((3, 8, 24, 24), (64, 8, 3, 3), padding=1),
    "padding as wide as filter": Convolution((4, 16, 48, 40), (32, 16, 3, 3), 1, 3, sliced=False),
    "wide padding": Convolution((4, 8, 48, 40), (32, 8, 5, 5), 1, 4, 2, sliced=False),
    "long strides, channels last": Convolution(
        (3, 4, 31, 31), (20, 4, 3, 3), 3, 1, channels_last=True, sliced=False
    ),
    "groups": Convolution((4, 16, 48, 40), (32, 8, 3, 3), 1, 1, groups=2, sliced=False),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_in_slices_is_equal(name: str, threads: int) -> None:
    convolution = CONVOLUTIONS[name]
    operands = convolution.drawn()

    def compute() -> Tensor:
        return torch.relu(convolution(operands[0] * 2, *operands[1:])).amax(-1)

    sliced = False
    with threads_set(threads), torch.no_grad():
        expected = compute()
        with rekindle.budget(None, learn=False) as run:
            compute()
        for share in (55, 70, 80, 95):
            tally, budget = Tally(), run.peak * share // 100
            with (
                suppress(rekindle.OutOfBudget),
                tally.counting(),
                rekindle.budget(budget, learn=False, split="equal") as run_in_slices,
                tally.of_a_budget(),
            ):
                found = compute()
                assert same(found, expected)
                assert tally.within <= budget
                sliced = sliced or "in slices: " in str(run_in_slices.report())
    if SLICED:
        assert sliced == convolution.sliced


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_convolution_in_turn_are_equal(name: str, threads: int) -> None:
    convolution = CONVOLUTIONS[name]
    operands = [each.requires_grad_() for each in convolution.drawn()]

    def gradients() -> list[Tensor]:
        result = torch.relu(convolution(operands[0].sin(), *operands[1:]))
        return [result.detach(), *torch.autograd.grad(result.square().sum(), operands)]

    with threads_set(threads):
        expected = gradients()
        with rekindle.budget(None, learn=False) as run:
            gradients()
        for share in (50, 65, 80):
            tally, budget = Tally(), run.peak * share // 100
            with (
                suppress(rekindle.OutOfBudget),
                tally.counting(),
                rekindle.budget(budget, learn=False, split="equal"),
                tally.of_a_budget(),
            ):
                assert same(gradients(), expected)
            assert tally.within <= budget


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1), (1, 2)])
def test_some_gradients_of_convolution_are_equal(wanted: tuple[int, ...]) -> None:
    convolution = CONVOLUTIONS["rows"]
    operands = convolution.drawn()
    for i in wanted:
        operands[i].requires_grad_()

    def gradients() -> list[Tensor]:
        result = torch.relu(convolution(operands[0].sin(), *operands[1:]))
        return list(torch.autograd.grad(result.square().sum(), [operands[i] for i in wanted]))

    expected = gradients()
    with rekindle.budget(None, learn=False) as run:
        gradients()
    for share in (45, 60, 75):
        with (
            suppress(rekindle.OutOfBudget),
            rekindle.budget(run.peak * share // 100, learn=False, split="equal"),
        ):
            assert same(gradients(), expected)


@if_sliced
def test_infinite_weight_meets_no_padding_between_slices() -> None:
    """A product of padding and infinity would be NaN: rows are cut off instead of padded."""
    x, weight, bias = CONVOLUTIONS["rows"].drawn()
    weight[0, 0, 0, 1] = torch.inf
    expected = CONVOLUTIONS["rows"](x, weight, bias).amax((0, 2))
    assert bool(expected.isfinite().logical_not().any())
    budget = 5 * x.nbytes
    with rekindle.budget(budget, learn=False, split="equal") as run:
        found = CONVOLUTIONS["rows"](x, weight, bias).amax((0, 2))
    assert "convolution (" in str(run.report())
    assert same(found, expected)


@pytest.mark.parametrize("factor", [2.0, 3.0, 4.0, 1.5])
@pytest.mark.parametrize("channels", [3, 32])
def test_upsampling_in_slices_is_equal(factor: float, channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 41, 30)

    def compute() -> Tensor:
        return (functional.interpolate(x, scale_factor=factor) * 2).sum(3)

    expected = compute()
    with rekindle.budget(None, learn=False) as run:
        compute()
    for share in range(25, 100, 10):
        tally, budget = Tally(), run.peak * share // 100
        with (
            suppress(rekindle.OutOfBudget),
            tally.counting(),
            rekindle.budget(budget, learn=False, split="equal"),
            tally.of_a_budget(),
        ):
            assert same(compute(), expected)
        assert tally.within <= budget
