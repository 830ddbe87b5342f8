"""Has an `OutOfBudget` of the first step name a budget for whole steps, once somebody asks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import torch

from rekindle._errors import OutOfBudget
from rekindle._progress import ProgressLine
from rekindle._types import Bytes
from rekindle.policies import Policy
from rekindle.pytorch.native import seen_natively
from rekindle.pytorch.online import (
    CAME_TOO_SHORT,
    ModelCall,
    Owners,
    interrupted_call,
    too_small,
)
from rekindle.pytorch.operators import seen_here
from rekindle.pytorch.rehearsed import Known, forecast


def look_ahead(
    error: OutOfBudget,
    traceback: TracebackType | None,
    owners: Owners,
    device: torch.device,
    policy: Policy,
    within_another: Callable[[], bool],
) -> None:
    """What `error` says is worth trying will be what the models that were called need for whole
    steps, as far as that can be known. Rehearsing them takes seconds: only if it is asked, and not
    within another budget, which would see it."""
    frame = interrupted_call(traceback)
    calls = list(owners.calls.values())
    if frame is not None:
        with suppress(TypeError, RuntimeError, NotImplementedError):  # it cannot be remembered
            calls = [ModelCall(frame)]
    if calls:
        error.look_ahead = partial(_name, calls, device, policy, within_another)


def _name(
    calls: Sequence[ModelCall],
    device: torch.device,
    policy: Policy,
    within_another: Callable[[], bool],
    error: OutOfBudget,
) -> None:
    if within_another():
        error.look_ahead = partial(_name, calls, device, policy, within_another)  # later
        return
    known, progress = _known(), ProgressLine()
    found: list[Bytes] = []
    for call in calls:
        # Whatever it is that cannot be rehearsed, the error that is there is what matters.
        with suppress(Exception):
            needed = forecast(call, error.held, device, policy, known, progress)
            if needed is not None:
                found.append(needed)
    progress.done()
    needed = max(found, default=0)
    if needed <= error.worth_trying:
        return
    too_small.rather(error.budget, needed)
    error.worth_trying = needed
    text: str = error.args[0]
    lines = [line for line in text.splitlines() if not line.startswith(CAME_TOO_SHORT)]
    lines.append(
        f"Whole steps need more, by a rehearsal on shapes: rather try rekindle.budget({needed})"
    )
    error.args = ("\n".join(lines),)


def _known() -> Known:
    """What ran so far, on either core."""
    found: Known = {}
    for name, sizes, cost, workspace in (*seen_here(), *seen_natively()):
        before = found.get((name, sizes), (0, 0))
        found[name, sizes] = max(before[0], cost), max(before[1], workspace)
    return found
