"""Define a schedule: actions in order, and the name of the planner or policy that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.schedule._actions import Action


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions for one trace. `verify(trace, schedule, budget)` checks that they are valid."""

    actions: tuple[Action, ...]
    made_by: str = ""
