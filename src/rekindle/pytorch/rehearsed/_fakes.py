"""Copy models, inputs and optimizers to fake tensors, which have shapes but no memory.

Fake tensors (`torch._subclasses.FakeTensorMode`) have storages with sizes but no contents. If a
program reads a number from a fake tensor (`tensor.item()`), `MadeUp` returns a made-up number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.online import GRADIENTS, INPUTS, OPTIMIZER, PARAMETERS, Shape
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
class MadeUp(TorchDispatchMode):
    """Dispatch mode that makes up a number when a program reads the contents of a fake tensor.

    The number is 1, or False for a bool tensor.

    Attributes:
        assumed: The source lines that read such a number, as text, in the order of the reads.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where
        self.assumed: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reads = func is torch.ops.aten._local_scalar_dense.default
        # a fake tensor may know its number (`constant`)
        if not reads or getattr(args[0], "constant", None) is not None:
            return func(*args, **(kwargs or {}))
        self.assumed[self._where()] = None
        dtype = args[0].dtype
        return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def _drop_listeners(module: nn.Module) -> None:
    """Remove the program's forward and backward hooks, which expect real tensors.

    Hooks from the package that defines the module's class stay, because the module may need them.
    Forward pre-hooks stay too, because they may make weights.
    """
    package = type(module).__module__.partition(".")[0]
    for hooks in (module._forward_hooks, module._backward_hooks):
        for key, hook in list(hooks.items()):
            code = getattr(hook, "__code__", None)
            installed = code is not None and "-packages" in code.co_filename
            if not installed or hook.__module__.partition(".")[0] != package:
                del hooks[key]


@final
class FakeStep:
    """A model, its inputs and its optimizers, copied to fake tensors, to run training steps.

    Attributes:
        fakes: Makes the fake tensors.
        model: The copy of the model.
        inputs: The copy of its inputs.
        optimizers: Optimizers of the copy.
        made_up: Answers the operators that read numbers of a tensor.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, where: Callable[[], str] = lambda: ""
    ) -> None:
        """Copy `model`.

        Args:
            model: The model, which is not changed.
            device: The device of the fake tensors.
            where: Returns the source line that runs, as text.
        """
        self.fakes = Fakes(device)
        self.model = self.fakes.model(model)
        for module in self.model.modules():
            _drop_listeners(module)
        self.inputs: Any = ()
        self.optimizers: list[Optimizer] = []
        self.made_up = MadeUp(where)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the block, operators make fake tensors, on the device of this step."""
        with self.fakes.mode, self.fakes.device, self.made_up:
            yield

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer of the copied model.

        It uses `foreach` where it would for real parameters. By default, PyTorch uses `foreach` for
        real parameters on an accelerator, but not for fake ones.
        """
        self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            on_device = is_accelerator(self.fakes.device)
            if on_device and "foreach" in group and not group.get("fused"):
                group["foreach"] = True if group["foreach"] is None else group["foreach"]

    def tensors(self) -> dict[str, Sequence[Tensor]]:
        """Return the tensors that exist between two training steps, by category."""
        parameters = list(self.model.parameters())
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return {
            PARAMETERS: parameters,
            GRADIENTS: [each.grad for each in parameters if each.grad is not None],
            OPTIMIZER: list(tensors_of(states)),
            INPUTS: [*self.model.buffers(), *tensors_of(self.inputs)],
        }
