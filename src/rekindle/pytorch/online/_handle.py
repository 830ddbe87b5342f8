"""What autograd holds in the place of a tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from rekindle.engine import Storage
from rekindle.pytorch.tensors import Geometry, Obituaries, privately, version_of


@final
class Handle:
    """One reference of autograd to a value: how to find it, and what it must look like.

    It knows no memory itself. Its death is queued in `released`, not acted on: it may come in any
    thread, amid anything.
    """

    __slots__ = ("geometry", "kept", "released", "saved", "storage", "version", "witness")

    def __init__(
        self, released: Obituaries[Storage], storage: Storage, geometry: Geometry, version: int
    ) -> None:
        self.released = released
        self.storage = storage
        self.geometry = geometry
        self.version = version  #: of the program's tensor when it was saved; negative: none
        #: The program's own tensor, if that was saved and not an alias of it.
        self.saved: weakref.ref[Tensor] | None = None
        #: That tensor itself, if somebody may ask for its attributes and it needs no gradient.
        self.kept: Tensor | None = None
        #: Has that tensor's version counter, where the storage does not know which one it is.
        self.witness: Tensor | None = None

    def current(self) -> Storage:
        """The storage that holds the value now."""
        storage = self.storage
        while storage.payload.successor is not None:
            storage = storage.payload.successor
        return storage

    def moved(self, storage: Storage) -> Tensor | None:
        """What the program's tensor is now, if `tensor.data = ...` gave it other memory since.

        Plain PyTorch computes with that, unless the node that made the tensor saved it.
        """
        tensor = self.saved() if self.saved is not None else None
        if tensor is None:
            return None
        watch = storage.payload.watch
        if watch is not None and watch.address == tensor.untyped_storage()._cdata:
            return None
        if tensor.grad_fn is not None and any(each is self for each in _packed(tensor.grad_fn)):
            return None
        with privately():
            return tensor.detach()

    def __del__(self) -> None:
        self.released.announce(self.storage)


def _packed(node: Any) -> Iterator[object]:
    """What hooks made of the tensors that `node` saved; nothing once it has run."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # of a custom function that has dropped them
                return
            for each in saved if isinstance(saved, list | tuple) else (saved,):
                yield each.data


def modified(
    dtype: torch.dtype, size: torch.Size, maker: str, now: int, expected: int
) -> RuntimeError:
    """PyTorch's own complaint about a saved tensor."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{dtype} {list(size)}], which is output of {maker}, is at version {now}; "
        f"expected version {expected} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


def kept(tensor: Tensor) -> tuple[Tensor, int]:
    """What cannot be rebuilt stays as it is, and its version.

    An alias of it: a result in its own graph would be a cycle that nobody can collect. A leaf has
    no graph.
    """
    if tensor.grad_fn is None:
        return tensor, version_of(tensor)
    alias = tensor.detach()
    if type(alias) is not type(tensor):  # one that dispatches for itself is of its type already
        alias = alias.as_subclass(type(tensor))
        vars(alias).update(vars(tensor))
    return alias, version_of(tensor)


def count_from(tensor: Tensor, version: int) -> None:
    """What stands for a tensor that was saved has its version: it may be saved again itself, and
    then handles of both ask one counter."""
    if not tensor.is_inference():
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # type: ignore[attr-defined]


def unpack_kept(kept: tuple[Tensor, int]) -> Tensor:
    """The inverse; raises if it was written meanwhile (R7)."""
    tensor, version = kept
    if version_of(tensor) != version:
        raise modified(tensor.dtype, tensor.shape, "a tensor", tensor._version, version)
    return tensor


def with_counter_of(tensor: Tensor) -> Tensor:
    """A tensor with the version counter of `tensor`, and without memory. Not below autograd."""
    with privately():
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness
