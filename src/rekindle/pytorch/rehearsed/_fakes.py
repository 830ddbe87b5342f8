"""Copy models, inputs and optimizers to fake tensors, which have shapes but no memory.

Fake tensors (`torch._subclasses.FakeTensorMode`) have storages with sizes but no contents. If a
program reads a number from a fake tensor (`tensor.item()`), `MadeUp` returns a made-up number.
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
    """Makes fake copies of tensors and modules on one device, one copy per original."""

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
        """Return a fake tensor with the shape, strides and dtype of `tensor`."""
        fake = self.of(Shape.of(tensor))
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
        return fake

    def model(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model` with fake parameters and buffers, which have no gradients."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._memo[id(tensor)] = self.like(tensor)
        return self.copy(model)

    def inputs(self, inputs: Any) -> Any:
        """Return a copy of `inputs` (nested containers of tensors), with fake tensors."""
        for tensor in tensors_of(inputs):
            self._memo[id(tensor)] = self.like(tensor)
        return self.copy(inputs)

    def copy(self, thing: Any) -> Any:
        with FakeCopyMode(self.mode):
            return copy.deepcopy(thing, self._memo)


@final
class MadeUp:
    """Makes up a number when a program reads the contents of a fake tensor.

    Attributes:
        assumed: The source lines that read such a number, as text, in the order of the reads.
    """

    def __init__(self, where: Any) -> None:
        self._where = where
        self.assumed: dict[str, None] = {}

    def knows(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return True if `func(*args)` reads a number from a fake tensor that does not know it."""
        if func is not torch.ops.aten._local_scalar_dense.default:
            return False
        return getattr(args[0], "constant", None) is None

    def answer(self, asked: Tensor) -> bool | float | int:
        """Return the made-up number for the tensor `asked`: 1, or False for a bool tensor."""
        self.assumed[self._where()] = None
        return False if asked.dtype is torch.bool else 1.0 if asked.is_floating_point() else 1


def as_on_device(optimizer: Optimizer | None, device: torch.device) -> None:
    """Make an optimizer of fake parameters use `foreach` where it would for real parameters.

    By default, PyTorch uses `foreach` for real parameters on an accelerator, but not for fake ones.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        if is_accelerator(device) and "foreach" in group and not group.get("fused"):
            group["foreach"] = True if group["foreach"] is None else group["foreach"]
