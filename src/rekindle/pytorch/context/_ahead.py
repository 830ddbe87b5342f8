"""Let an `OutOfBudget` name a budget that suffices for whole steps, found by a rehearsal.

At first the error names only the budget that one operator needed. `rekindle.budget` calls
`look_ahead` when such an error leaves the context. `error.rehearse()` then runs the step on fake
tensors, which have shapes but no memory, and simulates it within smaller and smaller budgets. If
the budget that failed was such a suggestion itself, `look_ahead` rehearses the step at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import torch

from rekindle import _clock
from rekindle._errors import OutOfBudget
from rekindle._progress import ProgressLine
from rekindle._units import format_bytes
from rekindle.policies import Policy
from rekindle.pytorch.native import backward_node, core, signatures_seen
from rekindle.pytorch.online import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    ModelCall,
    Owners,
    interrupted_call,
    too_small,
)
from rekindle.pytorch.rehearsed import Forecast, forecast

_STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)


class _TookTooLong(Exception):
    """The rehearsal of a step on fake tensors took longer than its time limit."""


def look_ahead(
    error: OutOfBudget,
    traceback: TracebackType | None,
    owners: Owners,
    device: torch.device,
    policy: Policy,
    within_another: Callable[[], bool],
    *,
    moves: bool,
) -> None:
    """Prepare `error.rehearse()`: it runs the models that the program called, on fake tensors.

    The rehearsal does not run inside another budget, which would count its tensors.

    Args:
        error: The error that left the budget.
        traceback: Traceback of the error, to find the call of a model that the error interrupted.
        owners: Has the first call of each model that ran within the budget.
        device: Device of the budget.
        policy: Policy of the budget, for the simulation.
        within_another: Returns True while any budget is active.
        moves: Weights, gradients and optimizer state may move to the host.
    """
    frame = interrupted_call(traceback)
    calls = list(owners.calls.values())
    if frame is not None:
        # If an argument of the model can be neither copied nor weakly referenced, or a container
        # of the program cannot be taken apart, there is no rehearsal.
        with suppress(Exception):
            calls = [ModelCall(frame)]
    if calls:
        error.can_rehearse(partial(_rehearse, calls, device, policy, moves, within_another))
        # A suggestion for one operator has failed. A rehearsal takes seconds, so later failures do
        # not repeat it: they occur in programs that it cannot help, and in loops.
        if too_small.is_second_failure(error.budget):
            error.rehearse()


def _note_moving(error: OutOfBudget, found: Sequence[Forecast]) -> None:
    """Add a note to `error`: the smallest budget if weights, gradients and state may move."""
    needed = max((each.needed for each in found), default=0)
    note = (
        f"With weights, gradients and optimizer state on the host, {format_bytes(needed)} suffice "
        f'for whole steps: rekindle.budget({needed}, evict="anything", swap=...)'
    )
    if needed and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _rehearse(
    calls: Sequence[ModelCall],
    device: torch.device,
    policy: Policy,
    moves: bool,
    within_another: Callable[[], bool],
    error: OutOfBudget,
    seconds: float,
) -> bool:
    """Rehearse `calls`, and write a budget that suffices for whole steps into `error`.

    Returns:
        False if the rehearsal was cut off after `seconds`: one with more time may find a budget.
    """
    if within_another():
        return False
    measured, progress, until = [*signatures_seen()], ProgressLine(), _clock.seconds() + seconds

    def report(text: str) -> None:
        if _clock.seconds() > until:
            raise _TookTooLong
        progress(text)

    native_core = core(build=False)
    assert native_core is not None  # the budget that raised `error` has started it
    node = partial(backward_node, native_core)

    def forecasts(moves: bool) -> list[Forecast]:
        found: list[Forecast] = []
        for call in calls:
            # A rehearsal may fail in any way; the user then gets the error without a better budget.
            with suppress(Exception):
                needed = forecast(
                    call, error.held, device, policy, measured, node, report, moves=moves
                )
                if needed is not None:
                    found.append(needed)
        return found

    found = forecasts(moves)
    if not moves and 2 * sum(error.held.get(each, 0) for each in _STATE) > error.budget:
        _note_moving(error, forecasts(True))
    progress.done()
    # While one model runs a step, the optimizer state of the others is in memory as well.
    coming = sum(each.coming for each in found)
    needed = max((each.needed + coming - each.coming for each in found), default=0)
    if needed and too_small.replace_suggestion(error.budget, needed):
        error.name(needed, "A budget that suffices for whole steps, by a rehearsal on shapes")
    return _clock.seconds() <= until
