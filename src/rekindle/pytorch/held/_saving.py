"""Let `torch.save` and `copy.deepcopy` read tensors one at a time, without pinning them.

Both ask a tensor for its storage. Whoever has a storage may take its address, so the storage would
stay in memory from then on. But these functions read a storage only where this file sees it:
`torch.save` when it writes the storage to the file, `deepcopy` before it returns. So a model larger
than the budget can be saved.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage, serialization

from rekindle.pytorch.online import Current

#: The method by which a tensor is asked for its storage when it is saved or copied.
_ASKS: Final = Tensor._typed_storage.__code__


class _Scope(threading.local):
    """The tensors that the current thread saves or copies.

    Attributes:
        tensors: The tensors whose storages were asked for, by storage. None: nothing is saved.
    """

    tensors: dict[int, Tensor] | None = None


_scope = _Scope()


@contextmanager
def reading_storages() -> Iterator[None]:
    """Mark the block as code that reads storages only where this file sees it."""
    before, _scope.tensors = _scope.tensors, {}
    try:
        yield
    finally:
        _scope.tensors = before


def is_asked_to_read(tensor: Tensor, depth: int) -> bool:
    """Return True if the caller `depth` frames up asks for a storage to save or copy it."""
    tensors = _scope.tensors
    if tensors is None or sys._getframe(depth).f_code is not _ASKS:
        return False
    tensors[tensor.untyped_storage()._cdata] = tensor
    return True


def saving(original: Any) -> Any:
    """Return a function for `torch.serialization._save`, which writes all parts of a file."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        with reading_storages():
            return original(*args, **kwargs)

    return save


def told_apart(original: Any) -> Any:
    """Return a function for `UntypedStorage.data_ptr`, by which `torch.save` tells storages apart.

    Within `torch.save` storages move, so that two of them may have the same address at two times.
    """

    @functools.wraps(original)
    def data_ptr(home: UntypedStorage) -> int:
        tensors = _scope.tensors
        # only the frame of `torch.save` compares addresses
        if tensors is not None and sys._getframe(1).f_globals is vars(serialization):
            return home._cdata if home.nbytes() else 0
        return original(home)

    return data_ptr


def writing(original: Any, keeper: Current[Any]) -> Any:
    """Return a function for `PyTorchFileWriter.write_record`, which reads a storage.

    Args:
        original: The method.
        keeper: The `EvictHeld` of the active budget.
    """

    @functools.wraps(original)
    def write_record(writer: Any, name: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = _scope.tensors or {}
        tensor = tensors.get(data._cdata) if isinstance(data, UntypedStorage) else None
        if keeper.now is None or tensor is None:
            return original(writer, name, data, *args, **kwargs)
        with keeper.now.present((tensor,), writes=False):
            return original(writer, name, data, *args, **kwargs)

    return write_record


def copying(original: Any, keeper: Current[Any]) -> Any:
    """Return a function for `Tensor.__deepcopy__`.

    Args:
        original: The method.
        keeper: The `EvictHeld` of the active budget.
    """

    @functools.wraps(original)
    def deepcopy(tensor: Tensor, memo: Any) -> Any:
        if keeper.now is None or id(tensor) in memo:
            return original(tensor, memo)
        with keeper.now.present((tensor,), writes=False), reading_storages():
            return original(tensor, memo)

    return deepcopy


WRITER: Final[Any] = torch._C.PyTorchFileWriter
