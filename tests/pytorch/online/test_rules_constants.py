"""Tests of rule R4 (sources): values without a recipe are pinned, also if a source is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.pytorch.harsh import WIDTH, deeper, harshest, vector

Step = Callable[[], object]


def _by_numpy(empty: Tensor) -> None:
    empty.detach().numpy().reshape(-1)[:] = 0.75


def _by_address(empty: Tensor) -> None:
    values = (ctypes.c_float * empty.numel())(*[0.75] * empty.numel())
    ctypes.memmove(empty.data_ptr(), values, ctypes.sizeof(values))


EMPTY: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(WIDTH),
    "empty_like": lambda: torch.empty_like(torch.ones(WIDTH)),
    "new_empty": lambda: torch.ones(3).new_empty(WIDTH),
    "empty_strided": lambda: torch.empty_strided((WIDTH,), (1,)),
    "zeros": lambda: torch.zeros(WIDTH),
    "zeros_like": lambda: torch.zeros_like(torch.ones(WIDTH)),
    "emptied": lambda: torch.empty(WIDTH).zero_(),
}


@pytest.mark.parametrize("filled", [_by_numpy, _by_address])
@pytest.mark.parametrize("name", EMPTY)
def test_memory_filled_outside_pytorch_keeps_its_contents(
    name: str, filled: Callable[[Tensor], None]
) -> None:
    """An operator allocates memory, and then code outside of PyTorch fills it.

    Rekindle must not recompute the operator, because that would give other contents.
    """

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            x = EMPTY[name]()
            filled(x)
            y = x + weight  # saves no tensor
            loss = (y.sin() * y).sum()
            del x, y
            loss = loss + deeper(weight, 8).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def _scaled(x: Tensor) -> None:
    x.mul_(2.0)


def _filled_in_part(x: Tensor) -> None:
    x[100:200] = 2.0


@pytest.mark.parametrize("written", [_scaled, _filled_in_part])
@pytest.mark.parametrize("name", ["zeros", "emptied"])
def test_zeros_filled_outside_and_then_written_keep_contents(
    name: str, written: Callable[[Tensor], None]
) -> None:
    """The first operator after the fill writes in place."""

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            x = EMPTY[name]()
            _by_address(x)
            written(x)
            loss = (x * weight).sum()
            del x
            loss = loss + deeper(weight, 8).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def test_memory_filled_by_numpy_and_operator_matches_pytorch() -> None:
    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            x = torch.empty(WIDTH)
            _by_numpy(x)
            x[100:200].fill_(2)
            x.mul_(0.5)
            y = x * weight
            loss = (y.sin() * y).sum()
            del x, y
            loss = loss + deeper(weight, 8).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def test_saved_memory_that_numpy_filled_keeps_its_contents() -> None:
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            noise = torch.empty(WIDTH)
            _by_numpy(noise)
            ctx.save_for_backward(noise, weight)
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            noise, weight = ctx.saved_tensors
            return gradient * noise * weight

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            loss = Save.apply(weight) + deeper(weight, 8).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def test_results_that_depend_on_sources_match_pytorch() -> None:
    """Rekindle cannot recompute weights, batches, and values made without grad, such as the mask.

    Only autograd and recipes hold the batch and the mask when other values need memory.
    """

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            batch = torch.from_numpy(weight.detach().numpy() * 2)
            with torch.no_grad():
                mask = (batch.sin() > 0.5).float()
            x = (weight * batch).sin() * mask
            loss = x.square().sum()
            del batch, mask, x
            loss = loss + deeper(weight, 10).sum()
            loss.backward()
            return loss, weight

        return step

    harshest(program)


def _in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


UPDATES: dict[str, Callable[[Tensor], object]] = {
    "no_grad": _in_place,
    "data": lambda w: w.data.mul_(0.5),
    "a part of data": lambda w: w.data[3:800].mul_(0.5),
    "out": lambda w: torch.mul(w.data, 0.5, out=w.data),
    "copy_": lambda w: w.data.copy_(torch.linspace(0, 1, WIDTH)),
    "foreach": lambda w: torch._foreach_mul_([w.data], 0.5),
    "optimizer": lambda w: torch.optim.SGD([w], lr=0.5, momentum=0.9).step(),
    "foreach optimizer": lambda w: torch.optim.Adam([w], lr=0.5, foreach=True).step(),
    "fused optimizer": lambda w: torch.optim.Adam([w], lr=0.5, fused=True).step(),
    "batch norm": lambda w: nn.functional.batch_norm(
        torch.rand(4, WIDTH), w.data, torch.ones(WIDTH), training=True
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_overwriting_weight_recomputes_values_that_need_it(name: str) -> None:
    """Evicted values whose recipes read the weight are recomputed before it is overwritten.

    PyTorch raises no error, because `weight + batch` saves nothing of the weight.
    """

    def program() -> Step:
        weight, other, batch = vector(True), vector(True), vector()
        weight.grad = vector()

        def step() -> object:
            x = (weight + batch).sin().square() + (weight + 1).cos().exp()
            loss = x.sum() + deeper(other, 12).sum()
            del x
            UPDATES[name](weight)
            loss = loss + deeper(other, 12).sum() * (weight + 3).tanh().sum()
            loss.backward()
            return loss, weight, other

        return step

    harshest(program)


def test_input_overwritten_before_backward_matches_pytorch() -> None:
    """The next batch is loaded into the same buffer before the backward pass has ended."""

    def program() -> Step:
        weight, buffer, other = vector(True), vector(), vector(True)

        def step() -> object:
            loss = torch.zeros(())
            for number in range(4):
                buffer.copy_(torch.full((WIDTH,), 0.1 * number))
                loss = loss + (weight + buffer).sin().square().sum() + deeper(other, 4).sum()
            buffer.zero_()
            loss.backward()
            return loss, weight, other

        return step

    harshest(program)


def test_optimizer_step_inside_backward_pass_matches_pytorch() -> None:
    """A hook updates each weight once its gradient exists, while other values need the old one."""

    def program() -> Step:
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        scales = nn.ParameterList(torch.rand(100, 8) for _ in range(6))
        batch = torch.rand(100, 8)

        def update(parameter: Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None

        for parameter in [*layers.parameters(), *scales.parameters()]:
            parameter.register_post_accumulate_grad_hook(update)

        def step() -> object:
            losses = []
            for _ in range(2):
                x = batch
                for layer, scale in zip(layers, scales, strict=True):
                    x = (layer(x) + scale).tanh() + x.sin()
                loss = x.square().mean()
                del x
                loss.backward()
                losses.append(loss.detach())
            return losses, layers, scales

        return step

    harshest(program)


def test_spectral_norm_power_iteration_matches_pytorch() -> None:
    """Spectral norm overwrites its vectors in each forward pass, under no_grad."""

    def program() -> Step:
        layers = [
            nn.utils.parametrizations.spectral_norm(nn.Linear(20, 20), n_power_iterations=2)
            for _ in range(3)
        ]
        network = nn.Sequential(*layers)
        batch = torch.rand(100, 20)

        def step() -> object:
            loss = network(network(batch)).exp().mean()
            loss.backward()
            return loss, network

        return step

    harshest(program)


def test_optimizer_steps_and_accumulation_match_pytorch() -> None:
    """Three steps of two micro-batches each within one budget: each step invalidates recipes."""

    def program() -> Step:
        network = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        batch = torch.rand(100, 8)

        def step() -> object:
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                for part in batch.chunk(2):
                    loss = network(part).square().mean()
                    loss.backward()
                    losses.append(loss.detach())
                optimizer.step()
            return losses, network

        return step

    harshest(program)


def test_frozen_and_shared_weights_match_pytorch() -> None:
    """The model has frozen layers, and one matrix that the embedding and the output share."""

    def program() -> Step:
        embedding = nn.Embedding(8, 8)
        frozen = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False) for _ in range(4)]
        words = torch.randint(8, (300,))

        def step() -> object:
            x = embedding(words)
            for layer in frozen:
                x = (x + layer(x)).sin()
            loss = nn.functional.cross_entropy(x @ embedding.weight.t(), words)
            del x
            loss.backward()
            return loss, embedding, nn.ModuleList(frozen)

        return step

    harshest(program)


def test_after_backward_pass_only_sources_are_in_memory() -> None:
    weights = [vector(True) for _ in range(10)]
    with rekindle.budget(14 * 4 * WIDTH) as run:
        loss = torch.zeros(())
        for weight in weights:
            loss = loss + deeper(weight, 2).sum()
        del loss
        assert run.memory == 10 * 4 * WIDTH
    assert run.evictions > 0


class Kept(torch.autograd.Function):
    """Copies a tensor. Rekindle does not recompute its results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_sources_that_only_loss_needs_leave_for_recomputation() -> None:
    """The loss is in memory, so nothing needs the sources from which it could be recomputed."""

    def gradients(share: float | None, peak: int = 0) -> tuple[list[Tensor | None], int]:
        torch.manual_seed(0)
        weights = [(torch.randn(64, 64) / 8).requires_grad_() for _ in range(8)]
        with rekindle.budget(share and int(share * peak), learn=False, split="never") as run:
            x = torch.randn(256, 64)
            for weight in weights:
                x = x @ weight
                x = torch.tanh(torch.cat([x[:128] * Kept.apply(x[:128] * 2), x[128:]]))
            loss = x.square().mean()
            del x
            loss.backward()
        return [weight.grad for weight in weights], run.peak

    expected, peak = gradients(None)
    found, _ = gradients(0.44, peak)
    assert all(map(torch.equal, found, expected))


def test_value_whose_source_was_overwritten_keeps_its_contents() -> None:
    """The value can no longer be recomputed, but other values are recomputed from it."""

    def program() -> Step:
        weight = vector(True)

        def step() -> object:
            a = weight.detach() * 2
            b = a.exp()
            with torch.no_grad():
                weight.add_(1)
            c = deeper(b.requires_grad_() * weight, 3)
            del a
            c.sum().backward()
            return weight, b

        return step

    harshest(program)
