"""Find the program's live tensors and other objects through Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from rekindle.pytorch.tensors._private import privately

T = TypeVar("T")

#: PyTorch's own method. A budget replaces `Tensor.untyped_storage` by a method that reports the
#: access to the storage.
_storage_of = torch._C.TensorBase.untyped_storage
_NO_CODE_OF_ITS_OWN = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def living_objects(*kinds: type[T]) -> list[T]:
    """Return every object of one of these classes that exists in the program.

    The check uses `type(thing)`, because `isinstance` may run code of proxy objects.
    """
    wanted: dict[type, bool] = {}
    found: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in wanted:
            wanted[kind] = issubclass(kind, kinds)
        if wanted[kind]:
            found.append(thing)
    return found


def living_tensors() -> list[Tensor]:
    """Return every tensor and parameter that exists in the program."""
    return living_objects(Tensor)


_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def parts_of(sparse: Tensor) -> list[Tensor]:
    """Return the strided tensors that make up a sparse tensor; an empty list for a dense one."""
    if sparse.layout is torch.strided or type(sparse) is not Tensor:
        return []
    with privately(), torch.no_grad():
        return [part(sparse) for part in _PARTS.get(sparse.layout, ())]


def homes_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of `tensors`.

    Wrapper subclasses, and tensors inside a transform such as vmap, are skipped, because the
    storages belong to their inner tensors. No Python code of subclasses runs, because the code of
    an uninitialized lazy parameter would raise an error.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return [
            _storage_of(tensor)
            for tensor in tensors
            if type(tensor).__torch_dispatch__ is _NO_CODE_OF_ITS_OWN  # type: ignore[attr-defined]
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and not is_functorch_wrapped_tensor(tensor)
        ]
