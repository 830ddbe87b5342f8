"""What the runtime costs beside the operators themselves: code that records, decides, rebuilds.

It depends on the machine, not on the program. Measured once for each process, on a
chain of operators so small that there is little else.
"""

from __future__ import annotations

import functools
import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from rekindle._types import Nanoseconds
from rekindle.pytorch.context import Run, budget

_LENGTH, _WIDTH = 120, 256
_TIGHT = 30 * 4 * _WIDTH  # bytes: a quarter of the chain
_ROUNDS = 5


class Prices(NamedTuple):
    """ns for each operator of a program, and for each that runs again with what made it necessary;
    the operators' own cost is left out."""

    operator: Nanoseconds
    again: Nanoseconds


@functools.cache
def prices() -> Prices:
    """Measure the least of a few rounds; takes about a tenth of a second, the first time."""
    weight = torch.full((_WIDTH,), 0.5, requires_grad=True)
    roomy = budget.unlimited(device="cpu")
    _chain(weight, roomy)  # what is seen for the first time is dearer
    operator: list[Nanoseconds] = []
    again: list[Nanoseconds] = []
    for _ in range(_ROUNDS):
        plain, _ = _chain(weight, None)
        kept, _ = _chain(weight, roomy.copy())
        tight, run = _chain(weight, budget(_TIGHT, device="cpu"))
        assert run is not None
        operator.append((kept - plain) // (2 * _LENGTH))
        again.append((tight - kept - run.recompute_ns) // max(1, run.recomputations))
    return Prices(max(0, min(operator)), max(0, min(again)))


def _chain(weight: Tensor, context: budget | None) -> tuple[Nanoseconds, Run | None]:
    with nullcontext() if context is None else context as run:
        start = time.thread_time_ns()  # others may be using this core, too
        x = weight
        for _ in range(_LENGTH):
            x = x.tanh()
        torch.autograd.grad(x.sum(), weight)
        del x
        return time.thread_time_ns() - start, run
