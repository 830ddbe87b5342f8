"""Habits: things that a training script does in addition, whatever its loop is.

Each habit is lines of code for some places of a training step. The places are: setup (before the
loop), before (the start of a step), batch (after `x` and `target` are assigned), around (a context
of the forward pass), call (replaces the forward pass), loss (after the loss), backward (replaces
`loss.backward()`), after (after the gradients are computed), between (after the optimizer's step),
zero (replaces `optimizer.zero_grad()`), last (the end of a step). A loop has at most one habit with
a `call`, `backward` or `zero`.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.pytorch.hunt.habits.between import BETWEEN
from tests.pytorch.hunt.habits.gradients import GRADIENTS
from tests.pytorch.hunt.habits.passes import PASSES


class Habit(NamedTuple):
    setup: str = ""
    before: str = ""
    batch: str = ""
    around: str = ""
    call: str = ""
    loss: str = ""
    backward: str = ""
    after: str = ""
    between: str = ""
    zero: str = ""
    last: str = ""


HABITS = {
    name: Habit(**slots) for rows in (GRADIENTS, PASSES, BETWEEN) for name, slots in rows.items()
}
