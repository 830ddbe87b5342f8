"""Who says what memory is for: modules of their parameters and buffers, optimizers of their state.

A model that is built before shows itself by its tensors: by the first, for the module that runs
then has all others in memory too, though they are read much later. One that is built inside of a
budget comes from operators like everything else: only the module that takes a tensor says what it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, final
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

_MOST_CALLS = 4  # models of which it is remembered how they were called


def memory_of(model: nn.Module, device: torch.device) -> Iterator[Tensor]:
    """Its parameters, their gradients, and its buffers, as far as they are on `device`."""
    for parameter in model.parameters():
        yield from _those_on(device, parameter, parameter.grad)
    yield from _those_on(device, *model.buffers())


def _those_on(device: torch.device, *tensors: Tensor | None) -> Iterator[Tensor]:
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
    """Those that showed themselves while it watched, and are still there."""

    def __init__(self, added: Callable[[Tensor, bool], None] | None = None) -> None:
        """`added`: is told of each tensor that a module is given, and whether as a parameter."""
        self._added = added
        self.optimizers: WeakSet[Any] = WeakSet()  #: those that made a step
        self.calls: dict[int, ModelCall] = {}  #: the first of each model, by its id
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._buffers: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._parameters.values())

    @property
    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())

    def running_model(self) -> nn.Module | None:
        """The outermost module that is just being called in this thread, if any is."""
        frame = running_call()
        if frame is None:
            return None
        model: nn.Module = frame.f_locals["self"]
        if len(self.calls) < _MOST_CALLS and id(model) not in self.calls:
            with suppress(TypeError, RuntimeError, NotImplementedError):  # objects of no reference
                self.calls[id(model)] = ModelCall(frame)
        return model

    def states_of(self, weights: Iterable[int], warm: WarmOptimizers) -> Iterator[Tensor]:
        """What optimizers that are new here have of `weights` from before: addresses of storages,
        by which `warm` finds them."""
        for address in weights:
            optimizer = warm.owner_of(address)
            if optimizer is not None and optimizer not in self.optimizers:
                self.optimizers.add(optimizer)
                yield from state_of(optimizer)

    def watch(self, stack: ExitStack) -> None:
        """From now on, until `stack` is closed."""

        def parameter(module: Any, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._add(tensor, True)

        def buffer(module: Any, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._add(tensor, False)

        stack.callback(register_module_parameter_registration_hook(parameter).remove)
        stack.callback(register_module_buffer_registration_hook(buffer).remove)

    @contextmanager
    def without(self, *tensors: Tensor) -> Iterator[None]:
        """Inside, nothing here refers to `tensors`; afterwards to what they are then."""
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
        (self._parameters if parameter else self._buffers)[id(tensor)] = tensor
        if self._added is not None:
            self._added(tensor, parameter)
