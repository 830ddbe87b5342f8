"""Measure the memory of a program: count storages from their first use until they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle._types import Bytes


class Meter(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live storages that operators make or read.

    A weak reference to each storage tells when the storage is freed. Counting takes a few
    microseconds per operator. Fake tensors can be counted too: their storages have sizes but no
    memory.

    Attributes:
        alive: Bytes of the storages that are alive now.
        peak: The largest value of `alive` since the last `restart`.
        peak_birth: Number of storages that had been counted when the peak was reached. A storage
            with a larger number did not exist at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: Bytes = 0
        self.peak: Bytes = 0
        self.peak_birth = 0
        self._births = 0
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], Bytes, int]] = {}
        self._disregarded: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count((args, kwargs, result))
        return result

    def count(self, values: Any) -> None:
        """Count the storages of the tensors in `values` with their current sizes."""
        for tensor in tensors_of(values):
            if tensor.device.type != "meta" and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage())
        if self.alive > self.peak:
            self.peak, self.peak_birth = self.alive, self._births

    def restart(self) -> None:
        """Set the peak to the bytes of the storages that are alive now."""
        self.peak, self.peak_birth = self.alive, self._births

    def disregard(self, tensor: Tensor) -> None:
        """Stop counting the storage of `tensor`, even if an operator reads or resizes it later."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            reference, size, birth = self._sizes[key]
            self._sizes[key] = (reference, 0, birth)
            self.alive -= size
            self._disregarded.add(key)

    def at_peak(self, tensors: Iterable[Tensor]) -> Bytes:
        """Return the bytes of the storages of `tensors` that existed at the peak."""
        keys = {each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided}
        seen = (self._sizes[key] for key in keys if key in self._sizes)
        return sum(size for _, size, birth in seen if birth <= self.peak_birth)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            reference, before, birth = self._sizes[key]
            if size == before or key in self._disregarded:
                return
        else:
            self._births += 1
            before, birth = 0, self._births
            reference = weakref.ref(storage, lambda _: self._freed(key))
        self._sizes[key] = (reference, size, birth)
        self.alive += size - before

    def _freed(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)[1]
        self._disregarded.discard(key)


def tensors_of(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of(tuple(values.values()))


def bytes_of(values: Any) -> Bytes:
    """Return the bytes of the storages of all tensors in `values`, each counted once."""
    homes = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors_of(values)}
    return sum(home.nbytes() for home in homes.values())
