"""Programs whose operators read addresses in Python, as launchers of Triton kernels do."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from tests.on_device.blocks import batch, blocks, training
from tests.on_device.machine import Machine


def _doubled(x: Tensor) -> Tensor:
    """Return twice `x`, after reading its address."""
    out = torch.empty_like(x)
    assert x.data_ptr()
    if x.is_cuda:
        torch.add(x, x, out=out)
    else:
        ctypes.memmove(out.data_ptr(), (x + x).data_ptr(), out.nbytes)
    return out


def by_address(machine: Machine) -> Any:
    """Train blocks with a custom operator whose body reads `data_ptr()`."""
    double = _operator("twice", _doubled)
    model = blocks(machine)

    def loss() -> Tensor:
        x = batch(machine)
        for block in model:
            x = double(block(x).tanh())
        return x.square().mean()

    return training(model, loss)


def in_triton(machine: Machine) -> Any:
    """Train blocks whose custom operator and `autograd.Function` launch a Triton kernel."""
    from tests.on_device.triton_kernel import doubled as launch

    double = _operator("twice_in_triton", launch)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return launch(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return launch(grad.contiguous())

    model: nn.Sequential = blocks(machine)

    def loss() -> Tensor:
        x = batch(machine)
        for block in model:
            x = Twice.apply(double(block(x).tanh()).sin())
        return x.square().mean()

    return training(model, loss)


def _operator(name: str, kernel: Any) -> Any:
    """Return a custom operator with a gradient, defined once in a process."""
    if name not in _made:
        operator = torch.library.custom_op(
            f"on_device::{name}", kernel, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        operator.register_fake(torch.empty_like)
        operator.register_autograd(lambda ctx, grad: operator(grad.contiguous()))
        _made[name] = operator
    return _made[name]


_made: dict[str, Any] = {}
