"""Measure the time that Rekindle itself takes for each operator: recording, deciding, evicting.

This overhead depends on the machine, not on the program. It is measured once per process, with a
chain of operators so small that the operators themselves take hardly any time.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from rekindle import _clock
from rekindle._types import Nanoseconds
from rekindle.pytorch.context import Run, budget

_LENGTH, _WIDTH = 120, 256
_TIGHT = 30 * 4 * _WIDTH  # a budget in bytes within which a quarter of all results of the chain fit
_ROUNDS = 5


class Prices(NamedTuple):
    """Time (ns) that Rekindle adds to an operator, without the cost of the operator itself.

    Attributes:
        operator: Overhead of each operator that a program calls.
        again: Overhead of each recomputed operator, including that of the earlier eviction of its
            result.
    """

    operator: Nanoseconds
    again: Nanoseconds


@functools.cache
def prices() -> Prices:
    """Measure Rekindle's overhead per operator. The first call takes about 0.1 s.

    The grad mode and the default device of the caller play no role.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        return _measured()


def _measured() -> Prices:
    weight = torch.full((_WIDTH,), 0.5, requires_grad=True)
    # run once before the measurement, because the first calls of a signature take longer
    _chain(weight, budget.unlimited(device="cpu"))
    rounds = [
        (
            _chain(weight, None),
            _chain(weight, budget.unlimited(device="cpu")),
            _chain(weight, budget(_TIGHT, device="cpu")),
        )
        for _ in range(_ROUNDS)
    ]
    (plain, _), (kept, _), (tight, recomputed) = map(min, zip(*rounds, strict=True))
    operator = (kept - plain) // (2 * _LENGTH)
    again = (tight - kept - recomputed.ns) // max(1, recomputed.operators)
    return Prices(max(0, operator), max(0, again))


class _Recomputed(NamedTuple):
    """Recomputation in a tight budget: time (ns), and number of recomputed operators."""

    ns: Nanoseconds = 0
    operators: int = 0

    @classmethod
    def of(cls, run: Run | None) -> _Recomputed:
        return cls() if run is None else cls(run.recompute_ns, run.recomputations)


def _chain(weight: Tensor, context: budget | None) -> tuple[Nanoseconds, _Recomputed]:
    """Run the chain of operators twice. Return time and recomputation of the second run."""
    with nullcontext() if context is None else context as run:
        _once(weight)
        before = _Recomputed.of(run)
        elapsed = _once(weight)
        after = _Recomputed.of(run)
    return elapsed, _Recomputed(after.ns - before.ns, after.operators - before.operators)


def _once(weight: Tensor) -> Nanoseconds:
    # Use the time of this thread instead of wall-clock time, because other processes may use this
    # core meanwhile.
    start = _clock.thread_now()
    x = weight
    for _ in range(_LENGTH):
        x = x.tanh()
    torch.autograd.grad(x.sum(), weight)
    del x
    return _clock.thread_now() - start
