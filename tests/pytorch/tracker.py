"""An independent measure of memory: follows every storage that the dispatcher shows it.

It knows nothing of Rekindle. Entered *around* `rekindle.budget(...)` it is the outer dispatch mode,
so it sees what the runtime dispatches in its turn, recomputations included. It counts a storage
from the first operator that returns it or is given it, to the moment when its memory is freed: a
weak reference to the storage's Python object dies then, also when only autograd held it. The
workspace of operators is not seen, neither by it nor by a budget.
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

#: The original method, which no budget sees: its own would pin the storage.
_home_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


class Measured(NamedTuple):
    """Peak and constants of a plain run, in bytes; budgets lie between the two.

    peak: the most that was alive at once.
    constants: what is alive when the run is over: parameters, buffers, gradients, the state of the
        optimizer, batches and whatever else its caller keeps. Nothing can be saved there. It is not
        quite a lower bound of the peak: where gradients are dropped before the forward pass, they
        are not there at its end.
    """

    peak: int
    constants: int

    @property
    def activations(self) -> int:
        """Activation memory above the constants: what a budget can save."""
        return self.peak - self.constants

    def budget(self, fraction: float) -> int:
        """The constants and this fraction of the activation memory; 1.0 is the plain peak."""
        return self.constants + int(fraction * self.activations)


def measure(step: Callable[[], object]) -> Measured:
    """Measure a plain run.

    `step` leaves nothing behind but what a training loop keeps; what it returns is kept until the
    constants are counted. It should take more than one optimizer step: the first one meets neither
    the optimizer's state nor the gradients of the step before.
    """
    with Tracker() as tracker:
        kept = step()
        gc.collect()  # cycles would count as constants
        constants = tracker.alive
        del kept
    return Measured(tracker.peak, constants)


@dataclass(slots=True)
class _Seen:
    storage: weakref.ref[torch.UntypedStorage]
    size: int


class Tracker(TorchDispatchMode):
    """`alive`: bytes of the storages seen so far that still have memory. `peak`: its maximum.

    resized: storages may lose their memory while they live and get it back, so that all of them are
        looked at again after every operator.
    """

    supports_higher_order_operators = True  # their results count, not what is inside

    def __init__(self, *, resized: bool = False) -> None:
        super().__init__()
        self._resized = resized
        self.alive = 0
        self.peak = 0
        self._seen: dict[int, _Seen] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor has no memory: its parts will come here
        kwargs = kwargs or {}
        self.see(args)
        self.see(kwargs)
        result = func(*args, **kwargs)
        self.see(result)
        higher = isinstance(func, HigherOrderOperator)  # has no schema
        if not higher and func._schema.is_mutable:  # a written storage may have grown
            self.see(args)
            self.see(kwargs)
        if self._resized:
            self._look_again()
        self.peak = max(self.peak, self.alive)
        return result

    def see(self, values: object) -> None:
        for tensor in _tensors(values):
            # A shape without memory is not counted, nor zeros of autograd's that have none, nor
            # tensors without a single storage (sparse).
            strided = tensor.device.type != "meta" and tensor.layout is torch.strided
            if strided and not tensor._is_zerotensor():
                home = _home_of(tensor)
                if home.device.type != "meta":  # as that of a FakeTensor
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
        """The count against a fresh look at everything that is alive."""
        assert all(seen.storage() is not None for seen in self._seen.values())
        assert self.alive == sum(seen.size for seen in self._seen.values())


def _bytes_in(storage: torch.UntypedStorage) -> int:
    """Return its bytes: an evicted storage keeps its size, and raises if its address is read."""
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
