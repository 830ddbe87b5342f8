"""Define `Schedule`: actions in order, and the name of the planner or policy that chose them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle.schedule._actions import Action


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions in order that run one trace. `verify(trace, schedule, budget)` checks them."""

    actions: tuple[Action, ...]
    made_by: str = ""
