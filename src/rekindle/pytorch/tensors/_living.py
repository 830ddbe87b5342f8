"""What the program has: the objects that Python's garbage collector knows of, and their memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from rekindle.pytorch.tensors._private import privately

T = TypeVar("T")

#: Inside a budget `Tensor.untyped_storage` is another one, which asks who calls it.
_storage_of = torch._C.TensorBase.untyped_storage
_NO_CODE_OF_ITS_OWN = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def living_objects(*kinds: type[T]) -> list[T]:
    """Every object of one of these classes.

    Asked of the type: `isinstance` runs code of objects that pretend to be others.
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
    """Every tensor and parameter."""
    return living_objects(Tensor)


_PARTS: dict[torch.layout, tuple[Callable[[Tensor], Tensor], ...]] = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def parts_of(sparse: Tensor) -> list[Tensor]:
    """The strided tensors that a sparse one consists of; none of what is not sparse."""
    if sparse.layout is torch.strided or type(sparse) is not Tensor:
        return []
    with privately(), torch.no_grad():
        return [part(sparse) for part in _PARTS.get(sparse.layout, ())]


def homes_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The memory of each tensor that has one and has it of its own.

    Not of those that answer operators themselves, nor of those inside a transform such as vmap,
    which a failed trace may leave behind: the tensors that they are made of have it. And subclasses
    are not asked through Python: a lazy module's parameter refuses before it is made.
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
