"""A schedule: actions in order, and who made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.schedule._actions import Action


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions for one trace. `verify(trace, schedule, budget)` says whether it is one."""

    actions: tuple[Action, ...]
    made_by: str = ""
