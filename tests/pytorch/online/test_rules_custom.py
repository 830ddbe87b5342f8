"""Tests of custom operators, with and without an autograd formula: their results are recomputed.

PyTorch runs a custom operator that has an autograd formula with grad mode off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import rekindle
from tests.pytorch.harsh import harshest

WIDTH = 32


@torch.library.custom_op("rekindle_tests::gated", mutates_args=())
def gated(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    assert not torch.is_grad_enabled()
    gate = torch.sigmoid(x @ weight)
    return x * gate, gate


@gated.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, of_result: Tensor, of_gate: Tensor) -> tuple[Tensor, Tensor]:
    x, weight, gate = ctx.saved_tensors
    inner = of_result * x * gate * (1 - gate)
    return of_result * gate + inner @ weight.t(), x.t() @ inner


gated.register_autograd(_backward, setup_context=_save)


def _program() -> Callable[[], Any]:
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(12)]
    batch = torch.randn(256, WIDTH)

    def step() -> list[Tensor]:
        x = batch
        for weight in weights:
            x = gated(x, weight)[0]
        x.square().mean().backward()
        return weights

    return step


@torch.library.custom_op("rekindle_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2.0


class Doubled(torch.autograd.Function):
    """Calls an operator that has no autograd formula, as wrappers of Triton kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = doubled(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradients[0] * result


def _program_without_formula() -> Callable[[], Any]:
    weight = torch.randn(64, WIDTH, requires_grad=True)

    def step() -> Tensor:
        x = weight
        for _ in range(12):
            x = Doubled.apply(x.sin())
        return torch.autograd.grad(x.sum(), weight)[0]

    return step


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_operator_called_in_autograd_function_is_recomputed(
    evict: Literal["saved", "anything"],
) -> None:
    harsh = harshest(_program_without_formula, evict=evict)
    assert harsh.again["rekindle_tests::doubled"] > 6


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_values_saved_by_custom_op_for_backward_are_recomputed(
    evict: Literal["saved", "anything"],
) -> None:
    harsh = harshest(_program, evict=evict)
    assert harsh.run.recomputations > 6
    assert sum(harsh.again.values()) > 6


def test_results_of_never_recompute_operators_are_not_evicted() -> None:
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(12)]
    x = torch.randn(256, WIDTH)
    results = 2 * 12 * x.nbytes

    def forward() -> None:
        y = x
        for weight in weights:
            y = gated(y, weight)[0]

    tight = rekindle.budget(results // 2, device="cpu")
    with pytest.raises(rekindle.OutOfBudget), tight, rekindle.never_recompute():
        forward()
