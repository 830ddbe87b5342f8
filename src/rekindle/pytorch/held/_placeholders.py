"""Placeholder storages: storages without memory, any access to which raises.

When the memory of a user-held storage is evicted, the storage becomes a placeholder.
`UntypedStorage._swap_data_ptr_` (since torch 2.12) exchanges the memory of two storages, with their
sizes and the flags that make an access raise. All tensors and views refer to the storage, not to
its memory, so the exchange affects all of them. A storage without memory needs these flags: without
them, kernels that iterate over elements would read from address 0, which ends the process.

PyTorch has a Python function to set the write flag, but none for the read flag, which makes reads
raise in every kernel and thread. Both flags are neighbors (`throw_on_mutable_data_ptr_`,
`throw_on_immutable_data_ptr_` in c10/core/StorageImpl.h). This file finds the position of the read
flag by setting the write flag on a temporary storage, and then tests the read flag.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from rekindle._errors import Unsupported
from rekindle.pytorch.tensors import privately

#: Number of bytes of a C++ `StorageImpl` (of 96) to search for the flag that makes reads raise.
_HEADER = 80


def _exchange(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the data pointers, sizes, allocators and flags of two storages."""
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]


def can_make_placeholders() -> bool:
    """Return True if this version of torch supports placeholders (storages whose access raises)."""
    try:
        flag_of_reading()
    except Unsupported:
        return False
    return True


@functools.cache
def flag_of_reading() -> int:
    """Return the position (bytes) in a `StorageImpl` of the flag that makes a read raise.

    The position is searched and tested once per process.

    Raises:
        Unsupported: This version of torch has no such flag next to the write flag.
    """
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        raise Unsupported(
            f'rekindle.budget(..., evict="anything") with torch {torch.__version__}: evicting '
            "values that your variables hold needs UntypedStorage._swap_data_ptr_ of torch 2.12. "
            'Update torch, or write evict="saved"'
        )
    position = _next_to_the_flag_of_writing()
    if position is None or not _makes_reading_raise(position):
        raise Unsupported(
            f'rekindle.budget(..., evict="anything") with torch {torch.__version__}: this torch '
            "cannot make an evicted storage raise an error when the program reads it. Write "
            'evict="saved"'
        )
    return position


def _next_to_the_flag_of_writing() -> int | None:
    """Return the position after the write flag in a `StorageImpl`, or None if it is not found.

    Setting the write flag changes two neighboring bytes: a flag for "any flag is set", and the
    write flag.
    """
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
    """Return True if setting the byte at `position` of a `StorageImpl` makes a read raise.

    The storage of this test has memory, so a read that does not raise does no harm.
    """
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
