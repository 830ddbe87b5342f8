"""Plant a defect, which tests must find: a recomputation that gives other values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.operators import Fingerprint, fingerprint_of


def off_by_the_last_bit(result: Tensor) -> Tensor:
    return result.nextafter(result + 1)


@contextmanager
def wrong_again(instead: Callable[[Tensor], Tensor] = off_by_the_last_bit) -> Iterator[None]:
    """Make recomputed `tanh` wrong while the context is open: a recomputation returns `instead`."""
    asked: set[tuple[int, Fingerprint]] = set()

    def tanh(x: Tensor) -> Tensor:
        result = x.clone()
        torch.ops.aten.tanh_.default(result)
        active = rekindle.budget._active
        if active is None:
            return result
        question = id(active), fingerprint_of(x)
        if question in asked:
            return instead(result)
        asked.add(question)
        return result

    library = torch.library.Library("aten", "IMPL")
    # the first override of a kernel in a process warns
    with warnings.catch_warnings(action="ignore"):
        library.impl("tanh", tanh, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
