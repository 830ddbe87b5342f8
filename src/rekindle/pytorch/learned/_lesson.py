"""One shape of a step, as it is remembered: numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from rekindle.engine import Route
from rekindle.trace import Trace


@final
@dataclass(eq=False)
class Lesson:
    """One shape of a step: its operators in order, and once it is planned, the route."""

    met: list[int]
    starts: list[int]
    """How many operators the trace has before each of them runs."""
    numbers: list[int]
    """How many storages: those that it makes follow."""
    trace: Trace | None
    """Until it is planned."""
    met_again: bool = False
    route: Route | None = None
    finished: bool = False
    """The search for the route is over: there will be no better one."""
    again: bool = False
    """The search was broken off, in another process: it is to be made again."""
    online_loss: float | None = None
    """What steps of this shape lost when the policy decided alone, the least; None: none did."""
    dearer: int = 0
    """Steps in a row that lost more along the route."""

    def lost_online(self, loss: float | None) -> None:
        """A step of this shape lost so much when the policy decided alone; None: it did not."""
        if loss is not None:
            self.online_loss = loss if self.online_loss is None else min(loss, self.online_loss)

    def as_numbers(self) -> dict[str, Any]:
        """For a file; `from_numbers` makes it a lesson again. It has a route."""
        assert self.route is not None
        return {
            "met": self.met,
            "starts": self.starts,
            "numbers": self.numbers,
            "route": self.route.as_numbers(),
            "finished": self.finished,
            "online_loss": self.online_loss,
        }

    @staticmethod
    def from_numbers(numbers: Mapping[str, Any]) -> Lesson:
        """The inverse of `as_numbers`."""
        route, finished = Route.from_numbers(numbers["route"]), numbers["finished"]
        return Lesson(
            numbers["met"], numbers["starts"], numbers["numbers"], None,
            route=route, finished=finished, again=not finished, online_loss=numbers["online_loss"],
        )  # fmt: skip
