"""Who says what memory is for: modules of their parameters and buffers, optimizers of their state.

A model that is built before shows itself by its tensors. One that is built inside of a budget comes
from operators like everything else: only the module that takes a tensor says what it is.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, final
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)


@final
class Owners:
    """Those that showed themselves while it watched, and are still there."""

    def __init__(self) -> None:
        self.optimizers: WeakSet[Any] = WeakSet()  #: those that made a step
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._buffers: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._parameters.values())

    @property
    def buffers(self) -> list[Tensor]:
        return list(self._buffers.values())

    def watch(self, stack: ExitStack) -> None:
        """From now on, until `stack` is closed."""

        def parameter(module: Any, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._parameters[id(tensor)] = tensor

        def buffer(module: Any, name: str, tensor: Tensor | None) -> None:
            if tensor is not None:
                self._buffers[id(tensor)] = tensor

        stack.callback(register_module_parameter_registration_hook(parameter).remove)
        stack.callback(register_module_buffer_registration_hook(buffer).remove)
