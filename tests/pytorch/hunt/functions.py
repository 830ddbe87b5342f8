"""Custom autograd functions as people write them, for random programs."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class SavesInput(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0) + 0.1 * x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ((x > 0) + 0.1 * x.cos())


class SavesResult(Function):
    @staticmethod
    def forward(ctx, x):
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


class OnContext(Function):
    """A function that stores tensors on `ctx` itself instead of saving them for backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.inner = x.sigmoid()
        ctx.x = x.detach()
        return ctx.inner * x

    @staticmethod
    def backward(ctx, gradient):
        inner, x = ctx.inner, ctx.x
        return gradient * inner * (1 + x * (1 - inner))


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.abs(), x.sign())
        return x.abs().sqrt() * x.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        size, sign = ctx.saved_tensors
        return gradient * 0.5 / size.clamp(min=0.1).sqrt_() * sign.abs()


class Reversed(Function):
    """A function whose result is a view of its input, like a gradient reversal."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Recomputes(Function):
    """A function that runs a module again in its backward pass, like a checkpoint."""

    @staticmethod
    def forward(ctx, module, x, *weights):
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *_ = ctx.saved_tensors
        weights = [w for w in ctx.module.parameters() if w.requires_grad]
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result = ctx.module(x)
            found = dict(
                zip(
                    [id(x), *map(id, weights)],
                    torch.autograd.grad(result, [x, *weights], gradient),
                    strict=True,
                )
            )
        return None, found[id(x)], *(found.get(id(w)) for w in ctx.module.parameters())


class MainGrad(Function):
    """A function that adds the weight's gradient to a buffer of its module in the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if not hasattr(ctx.module, "main_grad"):
            ctx.module.register_buffer("main_grad", torch.zeros(weight.shape))
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.module.main_grad.addmm_(flat.t(), x.reshape(-1, x.shape[-1]))
        return gradient @ weight, torch.zeros_like(weight), None


class OwnGrad(Function):
    """A function that adds to the `.grad` of a weight, and returns no gradient for it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        found = flat.t() @ x.reshape(-1, x.shape[-1])
        weight = ctx.weight
        weight.grad = found if weight.grad is None else weight.grad.add_(found)
        return gradient @ weight, None


class Cube(Function):
    """A function whose backward pass is another function, so it can be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return CubeBackward.apply(ctx.saved_tensors[0], gradient)


class CubeBackward(Function):
    @staticmethod
    def forward(ctx, x, gradient):
        square = x * x
        ctx.save_for_backward(x, square, gradient)
        return 3 * square * gradient

    @staticmethod
    def backward(ctx, again):
        x, square, gradient = ctx.saved_tensors
        return 6 * x * gradient * again, 3 * square * again


class PartlyUsed(Function):
    """A function with an unused result, whose gradient is None."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, None)
        return x.cos(), x.exp()

    @staticmethod
    def backward(ctx, first, second):
        x, nothing = ctx.saved_tensors
        assert nothing is None
        found = None if first is None else -first * x.sin()
        return found if second is None else found + second * x.exp()


class Buffered(Function):
    """A function that saves a buffer of its module, and a part of its input."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(module.table, x[:, :1])
        return x * module.table

    @staticmethod
    def backward(ctx, gradient):
        table, part = ctx.saved_tensors
        return gradient * table + 0 * part, None
