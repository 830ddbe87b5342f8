"""Recognize an `OutOfBudget` that other code replaced, and explain an OOM error of the device."""

from __future__ import annotations

from copy import copy

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.pytorch.native import Driver
from rekindle.pytorch.online import table_of

_INTERPRETER = "The following operation failed in the TorchScript interpreter."
#: The texts with which torch's pipeline stages wrap an error of their module.
_STAGE = ("Failed to run stage backward", "failed to run forward")


def lost_in(error: RuntimeError, driver: Driver) -> OutOfBudget | None:
    """Return the `OutOfBudget` that other code replaced by `error`, or None.

    Other code replaces the error in three ways. `load_state_dict` raises an error with the same
    text. TorchScript's interpreter raises an error without any text. A pipeline stage raises an
    error whose cause is the `OutOfBudget`.
    """
    cause = error.__cause__
    if isinstance(cause, OutOfBudget) and any(text in str(error) for text in _STAGE):
        return copy(cause)
    if driver.refused is None:
        return None
    moment, refused = driver.refused
    reason = str(refused).partition("\n")[0]
    nothing = str(error).startswith(_INTERPRETER) and str(error).endswith("RuntimeError: \n")
    lost = reason in str(error) or (nothing and driver.operators_run == moment)
    return copy(refused) if lost else None


def short_form(driver: Driver, budget: Bytes | None) -> str:
    """Return a note for the device's OOM error: the holders at the peak, and a budget to try."""
    peak = driver.steps.peak
    smaller = max(int(0.9 * peak), 1)
    within = "" if budget is None else f" before the budget of {format_bytes(budget)} was used up"
    return "\n".join(
        [
            f"The device ran out of memory{within} (the peak was {format_bytes(peak)}):",
            *table_of(driver.at_peak.categories),
            (
                "Write a smaller budget, so that values are evicted earlier: "
                f"rekindle.budget({smaller}),"
            ),
            'or let Rekindle measure the free memory of the device: rekindle.budget("auto")',
        ]
    )
