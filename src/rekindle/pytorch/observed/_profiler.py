"""Runs a step several times to see what it needs; what it learns is undone.

1. twice within the budget, unseen: the first makes optimizer state, the second has the peak;
2. in turns within the budget and without Rekindle, timed: what the bookkeeping costs. Within the
   budget a step comes before that is not timed: the first of a context is dearer than all others.
   The quickest counts, once another one confirms it: on a busy machine most samples are too long;
3. once more within the budget, all written down, with a look at who holds memory at that peak.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from rekindle._types import Bytes, Nanoseconds
from rekindle.policies import Policy
from rekindle.pytorch.context import Run, budget
from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.observed._bookkeeping import prices
from rekindle.pytorch.observed._undo import Undo
from rekindle.report._report import Report
from rekindle.trace import Trace

PATIENCE: Final = 4
"""So many times `repeats` steps are timed at most."""
ALIKE: Final = 0.1
"""Two samples that differ by less agree."""


@final
@dataclass(frozen=True, slots=True)
class Observed:
    """One step: what it did, and how long it takes (ns) plainly, and with the bookkeeping but with
    nothing let go. Under a budget both are measured less what eviction and bookkeeping cost."""

    trace: Trace
    report: Report
    plain_ns: Nanoseconds
    kept_ns: Nanoseconds
    noise: float = 0.0  #: how much longer the slowest of the timed steps took than the quickest


def observe(
    step: Callable[[], object],
    *,
    amount: str | Bytes | None = None,
    policy: Policy | None = None,
    device: str | torch.device | None = None,
    repeats: int = 3,
    clock: Callable[[], Nanoseconds] = time.perf_counter_ns,
    watch: Callable[[str], None] = lambda stage: None,
) -> Observed:
    """Runs `step`, three times and three times for each of `repeats`, or for up to `PATIENCE`
    times as many where they differ; `watch` is told what comes next.

    With no `repeats` it runs only once, nothing is undone, and times are those of the operators.
    """

    def timed(run: Run) -> Nanoseconds:
        _synchronize(run)
        start = clock()
        step()
        _synchronize(run)
        return clock() - start

    def within(*, record: bool = False) -> budget:
        if amount is None:
            return budget.unlimited(device=device, record=record)
        return budget(amount, policy=policy, device=device, record=record)

    if not repeats:
        watch("running")
        with within(record=True) as run:
            step()
        return _from_operators(run, policy, device)
    undo = Undo()
    plain: list[Nanoseconds] = []
    kept: list[Nanoseconds] = []
    try:
        watch("warming up")
        warm = _warm(step, within(), undo)
        for number in range(PATIENCE * repeats):  # in turns: a machine is not always equally busy
            if number >= repeats and _is_confirmed(kept) and _is_confirmed(plain):
                break
            watch(f"timing, {number + 1} of {max(number + 1, repeats)}")
            with within() as run, undo:
                step()
                before = _lost(run)
                elapsed = timed(run)
            kept.append(elapsed - (_lost(run) - before))
            if amount is None:
                with undo:
                    plain.append(timed(run))
        watch("writing down")
        run = _written(step, within(record=True), undo, warm)
        trace, report = run.trace, run.report()
    finally:
        undo.restore()
    if not plain:
        plain.append(max(1, min(kept) - prices().operator * len(trace.ops)))
    noise = max(max(times) / max(1, min(times)) - 1 for times in (plain, kept))
    return Observed(trace, report, min(plain), min(kept), noise)


def _is_confirmed(times: list[Nanoseconds]) -> bool:
    """Whether the quickest was no chance: the next is nearly as quick. One alone, if asked for."""
    quickest, *others = sorted(times) or [0]
    return not others or others[0] <= (1 + ALIKE) * quickest


def trace_of(step: Callable[[], object], device: str | torch.device | None, undo: Undo) -> Trace:
    """A step amid training: with optimizer state, and all that it meets counted from the start."""
    try:
        warm = _warm(step, budget.unlimited(device=device), undo)
        context = budget.unlimited(device=device, record=True)
        return _written(step, context, undo, warm).trace
    finally:
        undo.restore()


@final
@dataclass(frozen=True, slots=True)
class _Warm:
    """What a step leaves to the next one, and the memory that it needs."""

    peak: Bytes
    constants: list[weakref.ref[Tensor]]
    optimizers: list[Any]


def _warm(step: Callable[[], object], context: budget, undo: Undo) -> _Warm:
    """Two steps: the first makes the optimizer's state, the second has the peak."""
    with context as run, undo:
        step()
        run._driver.steps.forget_peak()
        step()
        return _Warm(run.peak, _constants(run), list(run._driver.owners.optimizers))


def _written(step: Callable[[], object], context: budget, undo: Undo, warm: _Warm) -> Run:
    """One step with everything written down, and an exact look at its peak."""
    with context as run, undo:
        driver = run._driver
        driver.owners.optimizers.update(warm.optimizers)
        _meet(driver, warm)
        driver.peak.expect(int(0.98 * warm.peak))  # it may differ by what little is left behind
        step()
    return run


def _from_operators(run: Run, policy: Policy | None, device: str | torch.device | None) -> Observed:
    trace = run.trace
    kept = trace.compute_ns + prices().operator * len(trace.ops)
    return Observed(trace, run.report(), max(1, trace.compute_ns), max(1, kept))


def _lost(run: Run) -> Nanoseconds:
    if not run.recomputations:
        return 0
    return run.recompute_ns + run.recomputations * prices().again


def _synchronize(run: Run) -> None:
    if is_accelerator(run._driver.device):
        accelerator.synchronize(run._driver.device)


def _constants(run: Run) -> list[weakref.ref[Tensor]]:
    """What the program still has of all that a step met: the next one starts with it."""
    return [weakref.ref(tensor) for tensor in run._driver.program_tensors()]


def _meet(driver: Any, warm: _Warm) -> None:
    """They count from the start, as they do in the middle of training.

    An optimizer's state comes last and in its own order: whether a step listed it by itself
    depends on what the process ran before.
    """
    of_optimizers = [
        entry
        for optimizer in warm.optimizers
        for entries in optimizer.state.values()
        for entry in entries.values()
        if isinstance(entry, Tensor)
    ]
    last = {id(entry) for entry in of_optimizers}
    for reference in warm.constants:
        tensor = reference()
        if tensor is not None and id(tensor) not in last:
            driver.meet(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                driver.meet(tensor.grad)
    for entry in of_optimizers:
        driver.meet(entry)
