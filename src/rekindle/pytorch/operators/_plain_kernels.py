"""Make AOTAutograd trace the kernels that eager PyTorch runs.

A plan made from the trace then gives the same bits as eager mode. By default, AOTAutograd replaces
the kernels of some operators by Python code (`OpOverload.py_impl`), even if the caller gives no
decompositions. For example, the Python code of dropout on a CPU draws a mask of another dtype and
scales in another order.

This file removes such Python code while AOTAutograd traces. Batch norm is the exception. Its
kernels write statistics although their schema does not say so. Its Python code calls the same
kernels through operators with correct schemas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._ops import OpOverload

_KEYS = (
    torch._C.DispatchKey.Autograd,  # type: ignore[attr-defined]
    torch._C.DispatchKey.CompositeImplicitAutograd,  # type: ignore[attr-defined]
)
_TELLING = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm")


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside the block, trace composite operators as their C++ kernels decompose them."""
    taken = [(each, key, each.py_kernels.pop(key)) for each in _taken_apart() for key in _KEYS
             if key in each.py_kernels]  # fmt: skip
    _forget(each for each, _, _ in taken)
    try:
        yield
    finally:
        for each, key, kernel in taken:
            each.py_kernels[key] = kernel
        _forget(each for each, _, _ in taken)


def _taken_apart() -> list[OpOverload]:
    """Return the overloads of aten operators that have Python code, except batch norm."""
    # Importing these two modules registers the Python implementations.
    import torch._decomp
    import torch._refs

    found: list[OpOverload] = []
    for name in torch.ops.aten:
        packet = getattr(torch.ops.aten, name)
        if name in _TELLING:
            continue
        found += [getattr(packet, overload) for overload in packet.overloads()]
    return [each for each in found if any(key in each.py_kernels for key in _KEYS)]


def _forget(overloads: Iterator[OpOverload]) -> None:
    """Clear PyTorch's caches of the kernels selected for each of `overloads`."""
    for each in overloads:
        each._dispatch_cache.clear()
