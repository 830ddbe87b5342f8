"""Memory as it is: bytes of the storages that operators show, from their birth to their death."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle._types import Bytes


class Meter(TorchDispatchMode):
    """Bytes of the storages that operators made or were given, while their memory lives.

    A weak reference to a storage dies when its memory is freed, whoever held it. It takes a few
    microseconds an operator, the same with a budget and without. Works for fake tensors too: they
    have storages with sizes, only no memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: Bytes = 0
        self.peak: Bytes = 0
        self.peak_birth = 0  #: storages born later were not there at the peak
        self._births = 0
        self._sizes: dict[int, tuple[weakref.ref[torch.UntypedStorage], Bytes, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.see((args, kwargs, result))
        return result

    def see(self, values: Any) -> None:
        """Counts the tensors in `values` from now on."""
        for tensor in tensors_of(values):
            if tensor.device.type != "meta" and tensor.layout is torch.strided:
                self._count(tensor.untyped_storage())
        if self.alive > self.peak:
            self.peak, self.peak_birth = self.alive, self._births

    def restart(self) -> None:
        """The peak is that of what comes now."""
        self.peak, self.peak_birth = self.alive, self._births

    def disregard(self, tensor: Tensor) -> None:
        """What holds `tensor` does not count any more."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes:
            reference, size, birth = self._sizes[key]
            self._sizes[key] = (reference, 0, birth)
            self.alive -= size

    def at_peak(self, tensors: Iterable[Tensor]) -> Bytes:
        """Bytes of those among `tensors` that were there at the peak."""
        keys = {each.untyped_storage()._cdata for each in tensors if each.layout is torch.strided}
        seen = (self._sizes[key] for key in keys if key in self._sizes)
        return sum(size for _, size, birth in seen if birth <= self.peak_birth)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            size = storage.nbytes()
            reference = weakref.ref(storage, lambda _: self._freed(key))
            self._births += 1
            self._sizes[key] = (reference, size, self._births)
            self.alive += size

    def _freed(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)[1]


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)
    elif isinstance(values, dict):
        yield from tensors_of(tuple(values.values()))


def bytes_of(values: Any) -> Bytes:
    """Bytes of the storages of all tensors in `values`, each once."""
    homes = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors_of(values)}
    return sum(home.nbytes() for home in homes.values())
