"""Programs with an `autograd.Function` that is recomputed as one operator, and test helpers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import rekindle
from rekindle import Run
from tests.pytorch.bits import differing

WIDTH = 64
ROWS = 256
DEPTH = 8


def filled(value: Tensor) -> Tensor:
    """Write to memory of `empty_like` by its address, as a Triton kernel does."""
    made = torch.empty_like(value)
    ctypes.memmove(made.data_ptr(), value.data_ptr(), value.nbytes)
    return made


@rekindle.recomputable
class Gate(Function):
    """A gate that saves its arguments, and a value written by address, as by a Triton kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        gate = filled(torch.sigmoid(x @ weight))
        ctx.save_for_backward(x, weight, gate)
        ctx.scale = scale
        return filled(x * gate * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, gate = ctx.saved_tensors
        gradient = gradient * ctx.scale
        inner = gradient * x * gate * (1 - gate)
        return gradient * gate + inner @ weight.t(), x.t() @ inner, None


Layer = Callable[[Tensor, Tensor], Tensor]


def gate(x: Tensor, weight: Tensor) -> Tensor:
    return Gate.apply(x, weight, 1.5)


def trained(layer: Layer, depth: int = DEPTH) -> list[Tensor]:
    """Return the loss and the gradients of a chain of `depth` calls of `layer`."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH).div(4).requires_grad_() for _ in range(depth)]
    x = torch.randn(ROWS, WIDTH)
    for weight in weights:
        x = layer(x, weight)
    loss = x.square().mean()
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in weights if weight.grad is not None)]


def compared(layer: Layer, share: float = 0.5) -> Run:
    """Train in plain PyTorch and within budgets, and assert equal bits.

    One budget has no limit, one has `share` of the peak, and one evicts all before each operator.

    Returns:
        The run within `share` of the peak.
    """
    wanted = {str(i): each for i, each in enumerate(trained(layer))}
    with rekindle.budget(None, learn=False) as roomy:
        got = {str(i): each for i, each in enumerate(trained(layer))}
    assert differing(got, wanted) == []
    with rekindle.budget(int(share * roomy.peak), learn=False) as run:
        got = {str(i): each for i, each in enumerate(trained(layer))}
    assert differing(got, wanted) == []
    run._driver.engine.check()
    # evicts all that may be evicted, before each operator
    with rekindle.budget("1GiB", learn=False) as harsh:
        harsh._driver.core.evict_before_every_op(harsh._driver.handle, True)
        got = {str(i): each for i, each in enumerate(trained(layer))}
    assert differing(got, wanted) == []
    return run


def kept(layer: Layer) -> str:
    """Train without a limit, and return the reason why the function `layer` is not recomputed."""
    wanted = {str(i): each for i, each in enumerate(trained(layer))}
    with rekindle.budget(None, learn=False) as run:
        got = {str(i): each for i, each in enumerate(trained(layer))}
    assert differing(got, wanted) == []
    (why,) = run._driver.functions_kept.values()
    assert any(why in sentence for sentence in run.report().advice)
    return why


def units_recomputed(layer: Layer, share: float = 0.5) -> int:
    """Return how often a function was recomputed as one operator, within `share` of the peak."""
    run = compared(layer, share)
    assert run._driver.functions_kept == {}
    return run.recomputations


def straight(body: Callable[[Any, Tensor, Tensor], Tensor]) -> Layer:
    """Return a layer with the forward pass `body` and the gradient of a matrix product."""

    @rekindle.recomputable
    class Straight(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return body(ctx, x, weight)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), x.t() @ gradient

    return Straight.apply
