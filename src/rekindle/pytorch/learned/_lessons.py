"""What is remembered of steps, from one `rekindle.budget(...)` to the next: numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch

from rekindle._types import Bytes
from rekindle.engine import Route
from rekindle.pytorch.learned._background import SECONDS, Planning
from rekindle.pytorch.learned._walk import is_of
from rekindle.trace import Trace

MOST_LESSONS: Final = 8
"""Shapes of steps that are remembered for a budget, and budgets for which they are."""
TRIES: Final = 4
"""Steps in a row that are written down after one of an unknown shape."""
LONGEST_PAUSE: Final = 1024
"""Steps without writing down, at most, where no shape was ever met twice."""


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


@final
class Lessons:
    """The shapes of steps within one budget, the one met last first, and the plan in the making."""

    def __init__(self, budget: Bytes) -> None:
        self.shapes: list[Lesson] = []
        self.note = ""  #: why a shape has no route
        self._budget = budget
        self._planning: tuple[Lesson, Planning] | None = None
        self._tries = 0
        self._pause = 0
        self._next_pause = TRIES

    def wants_more(self) -> bool:
        """Whether the next step should be written down."""
        return self._tries > 0

    def beginning_with(self, met: int) -> Lesson | None:
        """The planned shape, met last, that begins with this operator."""
        for lesson in self.shapes:
            if lesson.route is not None and lesson.met[0] == met:
                return lesson
        return None

    def over(self, step: list[int], written: Lesson | None) -> None:
        """A step that needed evictions is over; `written`: what was written down of it.

        Where no two steps are alike, writing down is given up for longer and longer.
        """
        for lesson in self.shapes:
            if is_of(lesson.met, step):
                lesson.met_again = True
                self.shapes.remove(lesson)
                self.shapes.insert(0, lesson)
                self._tries = max(0, self._tries - 1)
                self._pause, self._next_pause = 0, TRIES
                return
        if written is not None:
            self.shapes.insert(0, written)
            del self.shapes[MOST_LESSONS:]
            self._tries -= 1
            if self._tries == 0:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        elif self._pause > 0:
            self._pause -= 1
        elif self._tries == 0:
            self._tries = TRIES

    def plan(self, *, wait: bool) -> None:
        """Takes what the planning process has found, and starts the next; waits for all of it."""
        while True:
            if self._planning is None and not self._start():
                return
            if wait:
                self.wait(None)
            else:
                self._collect()
                return

    def wait(self, timeout: float | None) -> bool:
        """Waits for the plan in the making; whether there is none any more."""
        done = self._planning is None or self._planning[1].wait(timeout)
        self._collect()
        return done

    def _start(self) -> bool:
        for lesson in self.shapes:
            if lesson.trace is not None and lesson.met_again:
                trace, lesson.trace = lesson.trace, None
                try:
                    self._planning = lesson, Planning(trace, self._budget, SECONDS)
                except OSError as error:
                    self.note = f"no process to plan in: {error}"
                return self._planning is not None
        return False

    def _collect(self) -> None:
        if self._planning is None:
            return
        lesson, planning = self._planning
        running = planning.running
        lesson.route = planning.newest() or lesson.route
        if not running:
            if lesson.route is None:
                self.note = planning.error()
            planning.stop()
            self._planning = None

    def forget(self) -> None:
        """Forgets the shapes, and ends the planning."""
        self.shapes.clear()
        if self._planning is not None:
            self._planning[1].stop()
            self._planning = None


_lessons: dict[tuple[Bytes, torch.device], Lessons] = {}


def lessons_for(budget: Bytes, device: torch.device) -> Lessons:
    """What this process learned of steps on `device` within `budget`."""
    found = _lessons.pop((budget, device), None) or Lessons(budget)
    _lessons[budget, device] = found
    while len(_lessons) > MOST_LESSONS:
        _lessons.pop(next(iter(_lessons))).forget()
    return found


def forget_lessons() -> None:
    """As if nothing had been learned in this process."""
    while _lessons:
        _lessons.popitem()[1].forget()
