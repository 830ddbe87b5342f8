"""Represent the operators of a training step, and a plan for it, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from rekindle.engine import Route
from rekindle.pytorch.learned._step_times import Comparison
from rekindle.pytorch.native import core
from rekindle.trace import Trace

GRAPH: Final = 1
"""Bit of an operator's number: the operator is part of the autograd graph."""


@final
@dataclass(eq=False)
class StepPlan:
    """The operators of a recorded training step, and its plan once there is one.

    Attributes:
        op_ids: A number for each operator of the step, in order (`op_id_of` in the native core).
        starts: For each operator of the step, how many operators precede it in the trace.
        numbers: For each operator of the step, how many storages the trace has before this
            operator. Storages that the operator makes have the next numbers.
        trace: The trace of the recorded step; None once a search for its plan has started.
        met_again: True if a second step ran the same operators, so that a plan is worth its search.
        route: The plan, once found.
        finished: True if the search has ended, so no better plan will be found.
        again: True if another process aborted the search, so a new recording and search are needed.
        begins_with: Name of the step's first operator, for the user.
        times: Times of steps with and without the plan, which decide whether to follow it.
    """

    op_ids: list[int]
    starts: list[int]
    numbers: list[int]
    trace: Trace | None
    met_again: bool = False
    route: Route | None = None
    finished: bool = False
    again: bool = False
    begins_with: str = ""
    times: Comparison = field(default_factory=Comparison)

    @property
    def followed(self) -> Route | None:
        """The plan that steps should follow; None if there is none, or if it is slower."""
        return self.route if self.times.follows else None

    def found(self, route: Route) -> None:
        """Follow the new plan `route` from now on."""
        self.route = route
        self.times.begin()

    def as_numbers(self) -> dict[str, Any]:
        """Return operators and plan as plain data for a file; `from_numbers` is the inverse."""
        assert self.route is not None
        return {
            "op_ids": self.op_ids,
            "starts": self.starts,
            "numbers": self.numbers,
            "route": self.route.as_numbers(),
            "finished": self.finished,
            "begins_with": self.begins_with,
        }

    @staticmethod
    def from_numbers(numbers: Mapping[str, Any]) -> StepPlan:
        """Make a `StepPlan` from the result of `as_numbers`."""
        route, finished = Route.from_numbers(numbers["route"]), numbers["finished"]
        return StepPlan(
            numbers["op_ids"], numbers["starts"], numbers["numbers"], None,
            route=route, finished=finished, again=not finished, begins_with=numbers["begins_with"],
        )  # fmt: skip


def has_shape(shape: list[int], step: list[int]) -> bool:
    """Return True if the operators of a finished step match those of the recorded step `shape`."""
    native = core()
    return shape == step or (native is not None and native.step_has_shape(shape, step))
