"""Thirty custom functions, each from a tensor of floats to one of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.pytorch.hunt.functions import OnContext, SavesInput, SavesResult
from tests.pytorch.hunt.kit import halve

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "saves its input": SavesInput.apply,
    "saves its result": SavesResult.apply,
    "keeps attributes on ctx": OnContext.apply,
}


def _listed(name: str) -> Callable[[Any], Any]:
    """Add a function, or the `apply` of a class, under `name`."""

    def add(function: Any) -> Any:
        FUNCTIONS[name] = function.apply if isinstance(function, type) else function
        return function

    return add


@_listed("saves intermediates")
class SavesIntermediates(Function):
    @staticmethod
    def forward(ctx, x):
        size, sign = x.abs() + 0.1, x.sign()
        ctx.save_for_backward(size, sign)
        return size.sqrt() * sign

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        size, sign = ctx.saved_tensors
        return gradient * 0.5 / size.sqrt() * sign * sign


@_listed("numpy in forward")
class NumpyForward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.cos(x.detach().numpy()))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(-np.sin(x.numpy())) * gradient


@_listed("numpy in backward")
class NumpyBackward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate = 1 / (1 + np.exp(-x.numpy()))
        return gradient * torch.from_numpy(gate * (1 + x.numpy() * (1 - gate)))


@_listed("reads its address")
class ReadsAddress(Function):
    @staticmethod
    def forward(ctx, x):
        assert x.data_ptr() == x.untyped_storage().data_ptr() + 4 * x.storage_offset()
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert x.data_ptr() != 0
        return gradient * 2


@_listed("reads a number")
class ReadsNumber(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.scale = 1.0 + float(x.detach().abs().max().item() > 1)
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


@_listed("reads a list")
class ReadsList(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.scale = 1.0 + 0.01 * len([v for v in x.detach().flatten()[:4].tolist() if v > 0])
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


@_listed("two results")
class TwoResults(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * x.cos() - second * x.sin()


FUNCTIONS["two results"] = lambda x: sum(TwoResults.apply(x))


@_listed("a result unused")
def _unused(x: Tensor) -> Tensor:
    return TwoResults.apply(x)[0]


@_listed("writes its input")
class WritesInput(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


FUNCTIONS["writes its input"] = lambda x: WritesInput.apply(x * 1.5)


@_listed("returns its input")
class ReturnsInput(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.9


@_listed("differentiated twice")
class Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-2, 2) ** 3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.clamp(-2, 2) ** 2 * (x.abs() < 2)


@_listed("draws random numbers")
class Draws(Function):
    @staticmethod
    def forward(ctx, x):
        mask = (torch.rand_like(x) > 0.2).float()
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return gradient * mask


@_listed("runs autograd inside")
class Inside(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            result = (inner.tanh() * inner).sum(-1, keepdim=True).expand_as(inner)
        ctx.save_for_backward(inner, result)
        return result.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        inner, _ = ctx.saved_tensors
        with torch.enable_grad():
            again = (inner.tanh() * inner).sum(-1, keepdim=True).expand_as(inner)
        (found,) = torch.autograd.grad(again, inner, gradient)
        return found


@_listed("materializes nothing")
class NoMaterialize(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, None)
        return x.exp().clamp(max=3)

    @staticmethod
    def backward(ctx, gradient):
        x, nothing = ctx.saved_tensors
        assert nothing is None
        return None if gradient is None else gradient * x.exp() * (x.exp() < 3)


@_listed("half precision inside")
class HalfInside(Function):
    @staticmethod
    def forward(ctx, x):
        kept = x.to(torch.bfloat16)
        ctx.save_for_backward(kept)
        return kept.float() * 1.1

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return gradient * 1.1 + 0 * kept.float()


@_listed("packs bits")
class PacksBits(Function):
    @staticmethod
    def forward(ctx, x):
        mask = (x > 0).to(torch.uint8)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return gradient * mask


@_listed("vmap rule")
class WithSetup(Function):
    @staticmethod
    def forward(x):
        return x.erf()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 1.1283791670955126 * (-x * x).exp()


FUNCTIONS["custom operator by numpy"] = halve


@torch.library.custom_op("scenes::address", mutates_args=())
def _address(x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    assert x.data_ptr() != made.data_ptr()
    return made.copy_(x).mul_(1.25)


_address.register_fake(torch.empty_like)
_address.register_autograd(lambda ctx, gradient: gradient * 1.25)
FUNCTIONS["custom operator by address"] = _address


@torch.library.custom_op("scenes::fill", mutates_args=("into",))
def _fill(x: Tensor, into: Tensor) -> None:
    into.copy_(x * 0.75)


FUNCTIONS["custom operator that writes"] = lambda x: _Filled.apply(x)


class _Filled(Function):
    @staticmethod
    def forward(ctx, x):
        into = torch.empty_like(x)
        _fill(x.detach(), into)
        return into

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.75


@torch.library.custom_op("scenes::both", mutates_args=("count",))
def _both(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return x.detach().sin() + 1


_both.register_fake(lambda x, count: torch.empty_like(x))


@_listed("custom operator that returns and writes")
class _Counted(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _both(x.detach(), torch.zeros(()))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


@torch.library.custom_op("scenes::without_meta", mutates_args=())
def _without_meta(x: Tensor) -> Tensor:
    return x.detach().cos() * 2


_without_meta.register_autograd(
    lambda ctx, gradient: -gradient * ctx.saved_tensors[0].sin() * 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
FUNCTIONS["custom operator without a fake"] = _without_meta


@_listed("hook on a tensor")
def _hooked(x: Tensor) -> Tensor:
    made = x * 1.0
    if made.requires_grad:
        made.register_hook(lambda gradient: gradient * 1.5)
    return made


@_listed("detached and added")
def _straight_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


@_listed("to NumPy and back")
def _through_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy().copy())


@_listed("to a list and back")
def _through_list(x: Tensor) -> Tensor:
    return x * torch.tensor([x.detach().mean().tolist(), 1.0]).max()


@_listed("own data, replaced")
def _replaced(x: Tensor) -> Tensor:
    made = x.detach().clone()
    made.data = made.data * 0.5
    return x + made
