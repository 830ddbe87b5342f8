"""Replace kernels of PyTorch, for example by a defect that tests must find."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rekindle import budget
from rekindle.pytorch.operators import Fingerprint, fingerprint_of


def off_by_the_last_bit(result: Tensor) -> Tensor:
    return result.nextafter(result + 1)


@contextmanager
def replaced(name: str, kernel: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run `kernel` as the CPU kernel of the ATen operator `name` while the context is open."""
    library = torch.library.Library("aten", "IMPL")
    # the first override of a kernel in a process warns
    with warnings.catch_warnings(action="ignore"):
        library.impl(name, kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def wrong_again(instead: Callable[[Tensor], Tensor] = off_by_the_last_bit) -> Iterator[None]:
    """Make recomputed `tanh` wrong while the context is open: a recomputation returns `instead`."""
    # by budget, weakly: the address of one that is gone may be that of the next
    asked: WeakKeyDictionary[budget, set[Fingerprint]] = WeakKeyDictionary()

    def tanh(x: Tensor) -> Tensor:
        result = x.clone()
        torch.ops.aten.tanh_.default(result)
        active = budget._active
        if active is None:
            return result
        questions = asked.setdefault(active, set())
        question = fingerprint_of(x)
        if question in questions:
            return instead(result)
        questions.add(question)
        return result

    with replaced("tanh", tanh):
        yield
