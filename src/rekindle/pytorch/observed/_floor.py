"""Say which operators set the smallest budget of a step, and if slices of them may need less.

A simulation runs operators as a whole. On a CPU, those without room run in slices instead.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from rekindle._errors import remedy_for
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.report._data import Choice
from rekindle.trace import Trace, neediest

_NEARLY: Final = 0.9
"""An operator that needs at least this share of the smallest budget is the reason for it."""


def least_in_slices(
    trace: Trace, smallest: Bytes, sliceable: Container[str], *, is_in_slices: bool = False
) -> Bytes:
    """Return bytes that a step needs at least if the operators `sliceable` run in slices.

    Args:
        trace: The trace of the step.
        smallest: The smallest known budget, which is returned if slices cannot help.
        sliceable: The names of the operators.
        is_in_slices: True if operators run in slices within `smallest`.
    """
    if not is_in_slices and neediest(trace)[1] < _NEARLY * smallest:
        return smallest
    least = max(1, neediest(trace, sliceable)[1])
    return least if least < _NEARLY * smallest else smallest


def on_floor(trace: Trace, choices: Sequence[Choice], sliceable: Container[str]) -> tuple[str, ...]:
    """Return lines of advice on the operators that set the smallest budget.

    Args:
        trace: The trace of the step.
        choices: Budgets, the largest first: simulated ones, and measured ones in slices.
        sliceable: The names of the operators that run in slices if they have no room.
    """
    whole = min((choice.budget for choice in choices if not choice.measured), default=0)
    in_slices = choices[-1] if choices and choices[-1].measured else None
    operator, need, workspace = neediest(trace)
    if not whole or need < _NEARLY * whole:
        return ()
    remedy = remedy_for(operator, workspace / max(1, need))
    remedy = f" To avoid this: {remedy}." if remedy else ""
    if in_slices is not None:
        line = (
            f"Below {format_bytes(whole)}, operators run in slices, which takes longer: "
            f"{', '.join(in_slices.sliced)}.{remedy}"
        )
        floor = neediest(trace, sliceable)
        near = floor[1] >= _NEARLY * in_slices.budget
        return (line, f"No{_no_smaller(*floor)}") if near else (line,)
    if least_in_slices(trace, whole, sliceable) < whole:
        remedy = (
            f" {operator} can run in slices, which need less: to measure this, give "
            f"rekindle.profile a function that takes one step.{remedy}"
        )
        return (f"Without slices, no{_no_smaller(operator, need, workspace)}{remedy}",)
    return (f"No{_no_smaller(operator, need, workspace)}{remedy}",)


def _no_smaller(operator: str, need: Bytes, workspace: Bytes) -> str:
    """Return the rest of a sentence: no budget can be smaller than `need`, because of `operator`.

    Args:
        operator: The name of the operator; empty: it needs no memory.
        need: The bytes.
        workspace: The part of them that is workspace of the operator.
    """
    needed = format_bytes(need)
    needed += f" ({format_bytes(workspace)} of it workspace)" if workspace else ""
    at_once = f", and those that {operator} needs at once" if operator else ""
    return f" budget can be smaller than {needed}: tensors that are never evicted{at_once}."
