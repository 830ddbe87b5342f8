"""The ways by which others get at a tensor's memory, to write there without a word.

Each of them is seen inside a budget: what recipes made of the memory stays right
(native/memory/foreign.cpp).
Not among them: `data_ptr()`, by which kernels read far more often than they write.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, UntypedStorage
from torch.utils import dlpack

from rekindle.pytorch.operators import is_plain

T = TypeVar("T")
Wrap = Callable[[Any], Any]
#: Is told of memory that others may write from now on, before they can.
GivenAway = Callable[[UntypedStorage], None]

#: The functions behind `Tensor.__dlpack__`, by the modules that have them.
CAPSULES = {
    torch._C: ("_to_dlpack", "_to_dlpack_versioned"),
    dlpack: ("to_dlpack",),
    torch: ("to_dlpack",),
}
#: Write into a storage, or let another process do so. (Pickling for one comes through these.)
_OF_STORAGES = (
    "__setitem__",
    "_byteswap",
    "_set_from_file",
    "_share_cuda_",
    "_share_fd_cpu_",
    "_share_filename_cpu_",
    "copy_",
    "fill_",
)


@final
class Current(Generic[T]):
    """What functions that are replaced inside a budget ask for when they are called.

    They have it from here, and keep nothing of the budget themselves: compiled code, among others,
    may keep such a function for good.
    """

    def __init__(self) -> None:
        self.now: T | None = None  #: None: there is no budget

    @contextmanager
    def during(self, value: T) -> Iterator[None]:
        """Inside, it is `value`."""
        before, self.now = self.now, value
        try:
            yield
        finally:
            self.now = before


_told = Current[GivenAway]()


@contextmanager
def handing_out_seen(given_away: GivenAway) -> Iterator[None]:
    """Inside, `given_away` hears of whoever gets at memory of tensors, or writes storages."""

    def lent(original: Any) -> Any:
        @functools.wraps(original)
        def lend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            told = _told.now
            if told is not None and not by_rekindle(2):
                hand_out(told, tensor)
            return original(tensor, *args, **kwargs)

        return lend

    def written(original: Any) -> Any:
        @functools.wraps(original)
        def write(home: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            told = _told.now
            if told is not None:
                told(home)
            return original(home, *args, **kwargs)

        return write

    with _told.during(given_away), ExitStack() as stack:
        replace(stack, Tensor, "numpy", lent)
        for module, names in CAPSULES.items():
            for name in names:
                if hasattr(module, name):
                    replace(stack, module, name, lent)
        # For those who find it, NumPy's way (`__dlpack__`) is not the only one.
        hide(stack, Tensor, "__dlpack_c_exchange_api__")
        for name in _OF_STORAGES:
            if hasattr(UntypedStorage, name):
                replace(stack, UntypedStorage, name, written)
        yield


def hand_out(given_away: GivenAway, tensor: Tensor) -> None:
    """Others get the memory of `tensor`."""
    if is_plain(type(tensor)) and tensor.layout is torch.strided and tensor.device.type != "meta":
        given_away(tensor.untyped_storage())


def by_rekindle(depth: int) -> bool:
    """Whether a function of ours called, `depth` calls from here."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("rekindle.")


def replace(stack: ExitStack, owner: Any, name: str, wrap: Wrap) -> None:
    """Until `stack` unwinds, `owner` has another `name`; where it inherits it, it has its own."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name) if own is None else own))
    stack.callback(_put_back, owner, name, own)


def hide(stack: ExitStack, owner: Any, name: str) -> None:
    """Until `stack` unwinds, `owner` itself has no `name`."""
    own = vars(owner).get(name)
    if own is not None:
        delattr(owner, name)
        stack.callback(_put_back, owner, name, own)


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
