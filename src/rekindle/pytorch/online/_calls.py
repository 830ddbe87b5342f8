"""A record of the call of a model (an `nn.Module`), with shapes in place of tensors.

The record keeps neither the model nor its arguments alive. A rehearsal of the step rebuilds the
arguments from the record.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

#: Code object that runs for every call of an `nn.Module`, to recognize such calls in stack frames.
_CALL: Final = nn.Module._call_impl.__code__
_PLAIN: Final = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """The metadata of a tensor (sizes, strides, dtype, device), without its contents."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        """Return the metadata of `tensor`."""
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad)


@final
class ModelCall:
    """The call of a model, with its arguments.

    Tensors are recorded as shapes. Other objects are weak references, except containers and plain
    values.
    """

    def __init__(self, frame: FrameType) -> None:
        """Record the call that runs in `frame`, a frame of `nn.Module._call_impl`."""
        given = frame.f_locals
        self.model: weakref.ref[nn.Module] = weakref.ref(given["self"])
        # The constructors of containers, which belong to the program, run in a rehearsal only.
        leaves, self._containers = tree_flatten((given["args"], given["kwargs"]))
        self._arguments: list[Any] = [_kept(leaf) for leaf in leaves]

    def arguments(
        self, tensor_of: Callable[[Shape], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Rebuild the arguments of the call.

        Args:
            tensor_of: Makes a tensor from a recorded `Shape`.

        Returns:
            The positional and the keyword arguments.

        Raises:
            ReferenceError: An argument is no longer alive.
        """

        def again(kept: Any) -> Any:
            if type(kept) is Shape:
                return tensor_of(kept)
            found = kept() if type(kept) is weakref.ref else kept
            if found is None and kept is not None:
                raise ReferenceError("an argument of the model's call was freed")
            return found

        return tree_unflatten([again(each) for each in self._arguments], self._containers)


def running_call() -> FrameType | None:
    """Return the frame of the outermost `nn.Module` call in this thread, or None."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_code is _CALL:
            found = frame
        frame = frame.f_back
    return found


def interrupted_call(traceback: TracebackType | None) -> FrameType | None:
    """Return the frame of the outermost `nn.Module` call in an error's traceback, or None."""
    while traceback is not None and traceback.tb_frame.f_code is not _CALL:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


def _kept(value: Any) -> Any:
    """Return the record of one argument: a shape, the plain value, or a weak reference."""
    if isinstance(value, Tensor):
        return Shape.of(value)
    return value if isinstance(value, _PLAIN) else weakref.ref(value)
