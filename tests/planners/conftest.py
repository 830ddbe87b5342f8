"""Let planners count work instead of seconds, so that a plan is the same on every machine."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from rekindle import _clock
from rekindle.planners import _milp

_LOOK_S = 0.002  # seconds that pass when a planner looks at the clock
_NODES_PER_S = 50  # nodes of the branch-and-bound tree that the solver may visit in a second
_ITERATIONS_PER_S = 20_000  # of the simplex algorithm


class _Limited(_milp._Silent):
    """The solver with a limit of work in the place of its time limit."""

    def setOptionValue(self, name: str, value: Any) -> Any:
        if name != "time_limit":
            return super().setOptionValue(name, value)
        seconds = min(value, 1e4)
        super().setOptionValue("mip_max_nodes", int(seconds * _NODES_PER_S))
        return super().setOptionValue("simplex_iteration_limit", int(seconds * _ITERATIONS_PER_S))


@pytest.fixture(autouse=True)
def _work_instead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count()
    monkeypatch.setattr(_clock, "seconds", lambda: next(looks) * _LOOK_S)
    monkeypatch.setattr(_milp, "_Silent", _Limited)
