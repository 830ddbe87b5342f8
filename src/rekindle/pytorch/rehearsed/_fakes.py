"""Copies of models, inputs and optimizers that have shapes and no memory.

They are fake tensors (`torch._subclasses.FakeTensorMode`), which have storages with sizes but no
content. Where a program asks for a number, it gets a made-up one.
"""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer

from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.online import Shape
from rekindle.pytorch.tensors import tensors_of


@final
class Fakes:
    """Makes fake copies on one device; what was copied once is the same copy ever after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo: dict[int, Any] = {}

    def of(self, shape: Shape) -> Tensor:
        with self.mode:
            fake = torch.empty_strided(
                shape.size, shape.stride, dtype=shape.dtype, device=self.device
            )
            return fake.requires_grad_(shape.requires_grad)

    def like(self, tensor: Tensor) -> Tensor:
        """One of the shape, strides and type of `tensor`."""
        fake = self.of(Shape.of(tensor))
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
        return fake

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of it, without gradients."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._memo[id(tensor)] = self.like(tensor)
        return self.copy(model)

    def inputs(self, inputs: Any) -> Any:
        """A copy of tensors, and of what holds them."""
        for tensor in tensors_of(inputs):
            self._memo[id(tensor)] = self.like(tensor)
        return self.copy(inputs)

    def copy(self, thing: Any) -> Any:
        with FakeCopyMode(self.mode):
            return copy.deepcopy(thing, self._memo)


@final
class MadeUp:
    """Answers what only data know; `assumed` has where it did, as `where` says."""

    def __init__(self, where: Any) -> None:
        self._where = where
        self.assumed: dict[str, None] = {}

    def knows(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the program asks for a number that nobody has."""
        if func is not torch.ops.aten._local_scalar_dense.default:
            return False
        return getattr(args[0], "constant", None) is None

    def answer(self, asked: Tensor) -> bool | float | int:
        """1, or False."""
        self.assumed[self._where()] = None
        return False if asked.dtype is torch.bool else 1.0 if asked.is_floating_point() else 1


def as_on_device(optimizer: Optimizer | None, device: torch.device) -> None:
    """On an accelerator it treats plain parameters all at once, fake ones it would not."""
    for group in optimizer.param_groups if optimizer is not None else ():
        if is_accelerator(device) and "foreach" in group and not group.get("fused"):
            group["foreach"] = True if group["foreach"] is None else group["foreach"]
