"""Measure memory independently of Rekindle: follow every storage that the dispatcher shows.

Entered around `rekindle.budget(...)`, the tracker is the outer dispatch mode. So it sees the
operators that the runtime runs, recomputations included. It counts a storage from the first
operator that returns or reads it until its memory is freed. A weak reference to the storage's
Python object tells when, also if only autograd held the storage. The tracker does not see the
workspace (internal memory) of operators.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

#: The original method of torch.Tensor. The method that a budget installs would pin the storage.
_home_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


class Measured(NamedTuple):
    """Peak and constant memory of a run without a budget, in bytes. Budgets lie between the two.

    Attributes:
        peak: The most bytes in use at once.
        constants: Bytes in use at the end: parameters, buffers, gradients, optimizer state, batches
            and other tensors that the caller keeps. No budget can save these. They can exceed the
            least possible peak, because gradients may be deleted before the forward pass.
    """

    peak: int
    constants: int

    @property
    def activations(self) -> int:
        """Return the activation memory above the constants, which a budget can save."""
        return self.peak - self.constants

    def budget(self, fraction: float) -> int:
        """Return a budget: the constants, and a fraction of the activations. 1.0 gives the peak."""
        return self.constants + int(fraction * self.activations)


def measure(step: Callable[[], object]) -> Measured:
    """Run `step` without a budget, and measure its memory.

    `step` must leave only what a training loop keeps; its result is kept until the constants are
    counted. It should make several optimizer steps, because the first one has neither optimizer
    state nor gradients of an earlier step.
    """
    with Tracker() as tracker:
        kept = step()
        gc.collect()  # reference cycles would count as constants
        constants = tracker.alive
        del kept
    return Measured(tracker.peak, constants)


@dataclass(slots=True)
class _Seen:
    storage: weakref.ref[torch.UntypedStorage]
    size: int


class Tracker(TorchDispatchMode):
    """A dispatch mode that counts the bytes of all storages that it sees.

    Attributes:
        alive: Bytes in use now.
        peak: The maximum of `alive`.
        resized: True if storages may lose and regain their memory, so that all of them are checked
            after every operator.
    """

    # results of these operators count, but not the operators inside
    supports_higher_order_operators = True

    def __init__(self, *, resized: bool = False) -> None:
        super().__init__()
        self._resized = resized
        self.alive = 0
        self.peak = 0
        self._seen: dict[int, _Seen] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor has no memory; its local tensors are counted instead
        kwargs = kwargs or {}
        self.count(args)
        self.count(kwargs)
        result = func(*args, **kwargs)
        self.count(result)
        higher = isinstance(func, HigherOrderOperator)  # a higher-order operator has no schema
        if not higher and func._schema.is_mutable:  # a written storage may have grown
            self.count(args)
            self.count(kwargs)
        if self._resized:
            self._look_again()
        self.peak = max(self.peak, self.alive)
        return result

    def count(self, values: object) -> None:
        for tensor in _tensors(values):
            # Not counted: meta tensors, autograd's zero tensors without memory, and sparse
            # tensors, which have no single storage.
            strided = tensor.device.type != "meta" and tensor.layout is torch.strided
            if strided and not tensor._is_zerotensor():
                home = _home_of(tensor)
                if home.device.type != "meta":  # such as the storage of a FakeTensor
                    self._count(home)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, _bytes_in(storage)
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = _Seen(weakref.ref(storage, lambda _: self._freed(key)), size)
            self.alive += size
        elif seen.size != size:
            self.alive += size - seen.size
            seen.size = size

    def _look_again(self) -> None:
        for seen in list(self._seen.values()):
            storage = seen.storage()
            size = seen.size if storage is None else _bytes_in(storage)
            self.alive += size - seen.size
            seen.size = size

    def _freed(self, key: int) -> None:
        self.alive -= self._seen.pop(key).size

    def check(self) -> None:
        """Compare the count with a new count of all existing storages."""
        assert all(seen.storage() is not None for seen in self._seen.values())
        assert self.alive == sum(seen.size for seen in self._seen.values())


def _bytes_in(storage: torch.UntypedStorage) -> int:
    """Return the bytes that a storage occupies: 0 if it is evicted.

    An evicted storage still reports its old size, but reading its address raises.
    """
    try:
        storage.data_ptr()
    except RuntimeError:
        return 0
    return storage.nbytes()


def _tensors(values: object) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
