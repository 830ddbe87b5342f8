"""The call of a model, with what it was given as shapes: it keeps neither alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

_CALL: Final = nn.Module._call_impl.__code__  #: what runs for every call of a module
_PLAIN: Final = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a tensor without its content."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad)


@final
class ModelCall:
    """Which model was called, and with what: shapes in place of tensors, and weak references to
    whatever else is neither a container nor a plain value."""

    def __init__(self, frame: FrameType) -> None:
        given = frame.f_locals
        self.model: weakref.ref[nn.Module] = weakref.ref(given["self"])
        self._arguments: Any = tree_map(_kept, (given["args"], given["kwargs"]))

    def arguments(
        self, tensor_of: Callable[[Shape], Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments, with tensors as `tensor_of` makes them. Raises `ReferenceError` if some
        are gone."""

        def again(kept: Any) -> Any:
            if type(kept) is Shape:
                return tensor_of(kept)
            found = kept() if type(kept) is weakref.ref else kept
            if found is None and kept is not None:
                raise ReferenceError("what the model was called with is gone")
            return found

        return tree_map(again, self._arguments)


def running_call() -> FrameType | None:
    """The outermost call of a module in this thread, if any runs."""
    frame: FrameType | None = sys._getframe(1)
    found = None
    while frame is not None:
        if frame.f_code is _CALL:
            found = frame
        frame = frame.f_back
    return found


def interrupted_call(traceback: TracebackType | None) -> FrameType | None:
    """The outermost call of a module that an error came out of, if any did."""
    while traceback is not None and traceback.tb_frame.f_code is not _CALL:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape.of(value)
    return value if isinstance(value, _PLAIN) else weakref.ref(value)
