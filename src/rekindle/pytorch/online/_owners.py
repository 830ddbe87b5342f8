"""Track who owns memory: modules own parameters and buffers, optimizers own state.

When an operator first reads a parameter of a model that was built before the budget, all parameters
of the running model are registered: they are in memory although they are read later. A model that
is built inside a budget makes its parameters by operators, like any other value. They are known as
parameters once an `nn.Module` registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import final
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from rekindle.pytorch.online._calls import ModelCall, running_call
from rekindle.pytorch.online._warm import WarmOptimizers, state_of
from rekindle.pytorch.operators import STRIDED, is_plain

_MOST_CALLS = 4  # most models whose first call is recorded, for a rehearsal
_MOST_LOOKS = 1_000  # most times to look for the running model, which takes microseconds


def memory_of(model: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Iterate over parameters, gradients and buffers of `model` that are on `device`."""
    for parameter in model.parameters():
        yield from _those_on(device, parameter, parameter.grad)
    yield from _those_on(device, *model.buffers())


def _those_on(device: torch.device, *tensors: Tensor | None) -> Iterator[Tensor]:
    """Iterate over the plain strided tensors among `tensors` that are on `device`."""
    for tensor in tensors:
        if (
            tensor is not None
            and is_plain(type(tensor))
            and tensor.layout is STRIDED
            and tensor.device == device
        ):
            yield tensor


@final
class Owners:
    """The parameters, buffers and optimizers seen so far, as weak references."""

    def __init__(self, added: Callable[[Tensor, bool], None] | None = None) -> None:
        """Start with no parameters, buffers and optimizers.

        Args:
            added: Called with each tensor that an `nn.Module` registers, and True if it is a
                parameter.
        """
        self._added = added
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()  #: optimizers that made a step
        #: the first call of each model, by the model's id, to rehearse a step
        self.calls: dict[int, ModelCall] = {}
        self._looks = 0
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._buffers: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters registered so far that are still alive."""
        return list(self._parameters.values())

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers registered so far that are still alive."""
        return list(self._buffers.values())

    def running_model(self) -> nn.Module | None:
        """Return the outermost `nn.Module` that is being called in this thread, or None."""
        self._looks += 1
        frame = running_call()
        if frame is None:
            return None
        model: nn.Module = frame.f_locals["self"]
        if len(self.calls) < _MOST_CALLS and id(model) not in self.calls:
            # The call is not recorded if an argument allows no weak reference, or if a container
            # of the program cannot be taken apart.
            with suppress(Exception):
                self.calls[id(model)] = ModelCall(frame)
        return model

    @property
    def has_all_calls(self) -> bool:
        """True if no further call of a model is needed: enough are recorded, or none is found."""
        return len(self.calls) >= _MOST_CALLS or self._looks >= _MOST_LOOKS

    def states_of(self, weights: Iterable[int], warm: WarmOptimizers) -> Iterator[Tensor]:
        """Iterate over the state of optimizers, not seen so far, that own some of `weights`.

        Args:
            weights: Addresses of storages of parameters.
            warm: Finds the optimizer of a parameter.
        """
        for address in weights:
            optimizer = warm.owner_of(address)
            if optimizer is not None and optimizer not in self.optimizers:
                self.optimizers.add(optimizer)
                yield from state_of(optimizer)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Register each parameter and buffer that any module gets inside the block."""

        def parameter(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._add(tensor, True)

        def buffer(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._add(tensor, False)

        with ExitStack() as stack:
            stack.callback(register_module_parameter_registration_hook(parameter).remove)
            stack.callback(register_module_buffer_registration_hook(buffer).remove)
            yield

    @contextmanager
    def without(self, *tensors: Tensor) -> Iterator[None]:
        """Hold no weak reference to `tensors` inside the block. Register them again after it."""
        parameters = [each for each in tensors if self._parameters.pop(id(each), None) is not None]
        buffers = [each for each in tensors if self._buffers.pop(id(each), None) is not None]
        try:
            yield
        finally:
            for each in parameters:
                self._add(each, True)
            for each in buffers:
                self._add(each, False)

    def _add(self, tensor: Tensor, parameter: bool) -> None:
        """Register a tensor of a module, and call `added` for it."""
        (self._parameters if parameter else self._buffers)[id(tensor)] = tensor
        if self._added is not None:
            self._added(tensor, parameter)
