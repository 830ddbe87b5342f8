"""Run a step in two ways from the same state of the program, and compare the outcomes.

`rekindle.plan` calls it to compare a planned model with the eager one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.pytorch.context import budget as budget_context
from rekindle.pytorch.observed._before import Before, Undo
from rekindle.pytorch.observed._observe import Key, Names, left_behind


@final
class Failed(Exception):
    """Step `other` raised an error where step `plain` did not. `__cause__` is that error."""


def differing(
    plain: Callable[[], object], other: Callable[[], object], budget: Bytes
) -> tuple[Key, ...]:
    """Run `plain` and `other` from the same state, and return the names of tensors that differ.

    It compares results, gradients, buffers and generators bit for bit. Afterwards it restores the
    state of the program.

    Args:
        plain: The step as eager code. It runs within `rekindle.budget`.
        other: The same step in another form, perhaps compiled. It runs without a budget.
        budget: Bytes for `plain`. If they do not suffice, `plain` runs again with more.

    Returns:
        One pair (kind, name) for each tensor or number that differs.

    Raises:
        Failed: `other` raised an error. An error of `plain` is raised as it is.
    """
    before = Before()
    names = Names(before)
    try:
        wanted = _within(budget, plain, before, names)
        before.restore()
        try:
            found = _outcome(other, before, names)
        except Exception as error:
            raise Failed from error
    finally:
        before.restore()
    return tuple(key for key in {**wanted, **found} if wanted.get(key) != found.get(key))


def _within(
    budget: Bytes, step: Callable[[], object], before: Before, names: Names
) -> dict[Key, object]:
    while True:
        try:
            with budget_context(budget):
                result = _run(step, before)
            # Compare after the budget has ended, so that no tensor is evicted.
            return left_behind(result, before, names)
        except OutOfBudget as error:
            budget = max(error.rehearse(), budget + 1)
        before.restore()


def _outcome(step: Callable[[], object], before: Before, names: Names) -> dict[Key, object]:
    return left_behind(_run(step, before), before, names)


def _run(step: Callable[[], object], before: Before) -> object:
    with Undo(before):
        return step()
