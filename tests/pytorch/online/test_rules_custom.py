"""Tests of custom operators with a backward pass of their own, which run with grad mode off."""

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


@pytest.mark.parametrize("evict", ["saved", "anything"])
def test_values_saved_by_custom_operators_are_recomputed(
    evict: Literal["saved", "anything"],
) -> None:
    harsh = harshest(_program, evict=evict)
    assert harsh.run.recomputations > 6
    assert sum(harsh.again.values()) > 6


def test_not_if_they_are_not_to_run_twice() -> None:
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
