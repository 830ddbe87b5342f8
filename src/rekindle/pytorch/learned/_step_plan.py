"""Represent the operators of a training step, and a plan for it, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from rekindle.engine import Route
from rekindle.trace import Trace


@final
@dataclass(eq=False)
class StepPlan:
    """The operators of a recorded training step, and its plan once there is one.

    Attributes:
        op_ids: A number for each operator of the step, in order (see `_sequence_matcher`).
        starts: For each operator of the step, how many operators precede it in the trace.
        numbers: For each operator of the step, how many storages the trace has before this
            operator. Storages that the operator makes have the next numbers.
        trace: The trace of the recorded step; None once a search for its plan has started.
        met_again: True if a second step ran the same operators, so that a plan is worth its search.
        route: The plan, once found.
        finished: True if the search has ended, so no better plan will be found.
        again: True if another process aborted the search, so a new recording and search are needed.
        online_loss: The least loss of steps with these operators that followed no plan. The loss is
            recomputation time divided by computation time. None: there was no such step.
        dearer: Number of successive steps that lost more time with the plan than without it.
    """

    op_ids: list[int]
    starts: list[int]
    numbers: list[int]
    trace: Trace | None
    met_again: bool = False
    route: Route | None = None
    finished: bool = False
    again: bool = False
    online_loss: float | None = None
    dearer: int = 0

    def lost_online(self, loss: float | None) -> None:
        """Update `online_loss` after a step that ran the same operators.

        Args:
            loss: Recomputation time divided by computation time. None: the step followed a plan.
        """
        if loss is not None:
            self.online_loss = loss if self.online_loss is None else min(loss, self.online_loss)

    def as_numbers(self) -> dict[str, Any]:
        """Return operators and plan as plain data for a file; `from_numbers` is the inverse."""
        assert self.route is not None
        return {
            "op_ids": self.op_ids,
            "starts": self.starts,
            "numbers": self.numbers,
            "route": self.route.as_numbers(),
            "finished": self.finished,
            "online_loss": self.online_loss,
        }

    @staticmethod
    def from_numbers(numbers: Mapping[str, Any]) -> StepPlan:
        """Make a `StepPlan` from the result of `as_numbers`."""
        route, finished = Route.from_numbers(numbers["route"]), numbers["finished"]
        return StepPlan(
            numbers["op_ids"], numbers["starts"], numbers["numbers"], None,
            route=route, finished=finished, again=not finished, online_loss=numbers["online_loss"],
        )  # fmt: skip
