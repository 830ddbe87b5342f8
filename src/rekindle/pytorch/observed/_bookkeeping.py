"""Measure the time that Rekindle itself takes for each operator: recording, deciding, evicting.

This overhead depends on the machine, not on the program. It is measured once per process, with a
chain of operators so small that the operators themselves take hardly any time.
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
_TIGHT = 30 * 4 * _WIDTH  # budget in bytes: a quarter of all results of the chain
_ROUNDS = 5


class Prices(NamedTuple):
    """Time (ns) that Rekindle adds to an operator, without the cost of the operator itself.

    Attributes:
        operator: Overhead of each operator that a program calls.
        again: Overhead of each recomputed operator, with that of evicting its result before.
    """

    operator: Nanoseconds
    again: Nanoseconds


@functools.cache
def prices() -> Prices:
    """Return the smallest overhead of a few measurements. The first call takes about 0.1 s."""
    weight = torch.full((_WIDTH,), 0.5, requires_grad=True)
    roomy = budget.unlimited(device="cpu")
    _chain(weight, roomy)  # warm-up: first calls of a signature take longer
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
        start = time.thread_time_ns()  # not wall-clock time: other processes may use this core
        x = weight
        for _ in range(_LENGTH):
            x = x.tanh()
        torch.autograd.grad(x.sum(), weight)
        del x
        return time.thread_time_ns() - start, run
