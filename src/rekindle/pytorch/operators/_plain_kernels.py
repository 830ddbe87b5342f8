"""Tracing with the kernels that eager PyTorch runs: a plan's numbers are eager's, bit for bit.

Under AOTAutograd some operators are taken apart by Python code in place of their kernels, whatever
table of decompositions is given: those with one registered for a dispatch key
(`OpOverload.py_impl`). Dropout on a CPU, for one, then draws a mask of another type and scales in
another order. Here those registrations are out of the way, but for batch norm, whose kernels write
the statistics behind the schema's back: its Python code calls the same kernels under schemas that
tell.
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
    """Inside, composite operators are traced as their kernels take them apart."""
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
    import torch._decomp  # registers them
    import torch._refs

    found: list[OpOverload] = []
    for name in torch.ops.aten:
        packet = getattr(torch.ops.aten, name)
        if name in _TELLING:
            continue
        found += [getattr(packet, overload) for overload in packet.overloads()]
    return [each for each in found if any(key in each.py_kernels for key in _KEYS)]


def _forget(overloads: Iterator[OpOverload]) -> None:
    for each in overloads:
        each._dispatch_cache.clear()
