"""Habits that go with any loop: lines at its places.

setup: before the loop. before: when a step begins. batch: when `x` and `target` are there. around:
a context of the forward pass. call: the forward pass itself. loss: after the loss is there.
backward: in the place of `loss.backward()`. after: when gradients are there. between: when the
optimizer has made its step. zero: in the place of `optimizer.zero_grad()`. last: at the end of a
step. Of two with the same `call`, `backward` or `zero` a loop has only one.
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
