"""Storages without memory, whose every use raises: what takes the place of evicted memory.

`UntypedStorage._swap_data_ptr_` (torch 2.12 on) exchanges the memory of two storages, and with it
their sizes and the flags that make an access raise. All tensors and views of a storage see it: they
refer to the storage, not to its memory. No memory alone would not do: kernels that iterate over
elements read from address 0 then, which ends the process. The flag that makes reading raise, in
every kernel and in every thread, has no function in Python; the one that makes writing raise has,
and is its neighbor (`throw_on_mutable_data_ptr_`, `throw_on_immutable_data_ptr_` in
c10/core/StorageImpl.h). So where it lies is found by setting the other one, on a storage made for
that, and nothing is believed that was not tried there.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from rekindle._errors import Unsupported
from rekindle.pytorch.tensors import privately

_HEADER = 80  #: bytes at the start of a StorageImpl that are looked at; it has 96


def _exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Each has the other's memory, and all that belongs to it."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def there_are_husks() -> bool:
    """Whether storages can be made to refuse to be read with this torch."""
    try:
        flag_of_reading()
    except Unsupported:
        return False
    return True


@functools.cache
def flag_of_reading() -> int:
    """Where in a storage the flag lies that makes reading raise; raises `Unsupported` if nowhere.

    Found and tried out once in a process.
    """
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        raise Unsupported(
            f'rekindle.budget(..., evict="anything") with torch {torch.__version__}: letting go of '
            "what your variables hold needs UntypedStorage._swap_data_ptr_ of torch 2.12. Update "
            'torch, or write evict="saved"'
        )
    position = _next_to_the_flag_of_writing()
    if position is None or not _makes_reading_raise(position):
        raise Unsupported(
            f'rekindle.budget(..., evict="anything") with torch {torch.__version__}: its storages '
            "cannot be made to refuse to be read, and nothing may read what is gone. Write "
            'evict="saved"'
        )
    return position


def _next_to_the_flag_of_writing() -> int | None:
    """Setting it sets two flags, one after the other: that any is set, and this one."""
    tensor = torch.zeros(4)
    address = tensor.untyped_storage()._cdata
    before = ctypes.string_at(address, _HEADER)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    after = ctypes.string_at(address, _HEADER)
    changed = [i for i in range(_HEADER) if before[i] != after[i]]
    if len(changed) != 2 or changed[1] != changed[0] + 1:
        return None
    position = changed[1] + 1
    return position if after[position] == 0 else None


def _makes_reading_raise(position: int) -> bool:
    """Tried on a storage that has memory, so that nothing is lost if it does not."""
    with privately():
        tensor, flagged = torch.ones(4), torch.UntypedStorage(16)
        ctypes.memset(flagged._cdata + position, 1, 1)
        _exchange(tensor.untyped_storage(), flagged)
        try:
            tensor.sum()
        except RuntimeError:
            _exchange(tensor.untyped_storage(), flagged)
            return bool((tensor == 1).all())
    return False
