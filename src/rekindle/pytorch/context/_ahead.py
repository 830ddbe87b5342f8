"""Has an `OutOfBudget` name a budget for whole steps, once its `rehearse` is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import torch

from rekindle._errors import OutOfBudget
from rekindle._progress import ProgressLine
from rekindle._types import Bytes
from rekindle.policies import Policy
from rekindle.pytorch.native import signatures_seen
from rekindle.pytorch.online import (
    ModelCall,
    Owners,
    interrupted_call,
    too_small,
)
from rekindle.pytorch.rehearsed import Known, forecast


class _TookTooLong(Exception):
    """A rehearsal is stopped."""


def look_ahead(
    error: OutOfBudget,
    traceback: TracebackType | None,
    owners: Owners,
    device: torch.device,
    policy: Policy,
    within_another: Callable[[], bool],
) -> None:
    """Have `error.rehearse()` run the models that were called, on shapes.

    Nothing is run before somebody asks, and nothing within another budget, which would see it.
    """
    frame = interrupted_call(traceback)
    calls = list(owners.calls.values())
    if frame is not None:
        with suppress(TypeError, RuntimeError, NotImplementedError):  # it cannot be remembered
            calls = [ModelCall(frame)]
    if calls:
        error.can_rehearse(partial(_rehearse, calls, device, policy, within_another))


def _rehearse(
    calls: Sequence[ModelCall],
    device: torch.device,
    policy: Policy,
    within_another: Callable[[], bool],
    error: OutOfBudget,
    seconds: float,
) -> bool:
    """Have `error` name the budget for whole steps. Return False if more may be found later."""
    if within_another():
        return False
    known, progress, until = _known(), ProgressLine(), time.monotonic() + seconds

    def report(text: str) -> None:
        if time.monotonic() > until:
            raise _TookTooLong
        progress(text)

    found: list[Bytes] = []
    for call in calls:
        # Whatever it is that cannot be rehearsed, the error that is there is what matters.
        with suppress(Exception):
            needed = forecast(call, error.held, device, policy, known, report)
            if needed is not None:
                found.append(needed)
    progress.done()
    needed = max(found, default=0)
    if needed > error.worth_trying:
        too_small.rather(error.budget, needed)
        error.name(needed, "What whole steps need, by a rehearsal on shapes")
    return time.monotonic() <= until


def _known() -> Known:
    """Return what ran so far."""
    found: Known = {}
    for name, sizes, cost, workspace in signatures_seen():
        before = found.get((name, sizes), (0, 0))
        found[name, sizes] = max(before[0], cost), max(before[1], workspace)
    return found
