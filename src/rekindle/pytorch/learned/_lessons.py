"""What is remembered of steps, from one `rekindle.budget(...)` to the next."""

from __future__ import annotations

import time
from typing import Final, final

import torch

from rekindle._cache import cache_folder
from rekindle._types import Bytes
from rekindle.pytorch.learned._background import SECONDS, Planning
from rekindle.pytorch.learned._lesson import Lesson
from rekindle.pytorch.learned._shelf import Claim, Shelf
from rekindle.pytorch.learned._walk import is_of

MOST_LESSONS: Final = 8
"""Shapes of steps that are remembered for a budget, and budgets for which they are."""
TRIES: Final = 4
"""Steps in a row that are written down after one of an unknown shape."""
LONGEST_PAUSE: Final = 1024
"""Steps without writing down, at most, where no shape was ever met twice."""
BETWEEN_LOOKS: Final = 0.05
"""Seconds, while another process searches."""


@final
class Lessons:
    """The shapes of steps within one budget, the one met last first, and the plan in the making."""

    def __init__(self, budget: Bytes, shelf: Shelf) -> None:
        self.shapes: list[Lesson] = []
        self.note = ""  #: why a shape has no route
        self._budget = budget
        self._shelf = shelf
        self._planning: tuple[Lesson, Planning, Claim] | None = None
        self._elsewhere = False  #: another process searches for what is needed here
        self._tries = 0
        self._pause = 0
        self._next_pause = TRIES

    def wants_more(self) -> bool:
        """Whether the next step should be written down."""
        return self._tries > 0 or any(lesson.again for lesson in self.shapes)

    def beginning_with(self, met: int) -> Lesson | None:
        """The planned shape, met last, that begins with this operator."""
        found = self._beginning_with(met)
        if found is None:
            self.shapes += self._shelf.beginning_with(met)
            del self.shapes[MOST_LESSONS:]
            found = self._beginning_with(met)
        return found

    def _beginning_with(self, met: int) -> Lesson | None:
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
                self.over_again(lesson, written)
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

    def over_again(self, lesson: Lesson, written: Lesson | None) -> None:
        """Likewise, where it is known that it was of that shape."""
        lesson.met_again = True
        if lesson in self.shapes:
            self.shapes.remove(lesson)
        self.shapes.insert(0, lesson)
        if lesson.again and written is not None:
            lesson.again, written.met_again = False, True
            self.shapes.insert(1, written)
        self._tries = max(0, self._tries - 1)
        self._pause, self._next_pause = 0, TRIES

    # -- the plan in the making -----------------------------------------------------------------

    def plan(self, *, wait: bool) -> None:
        """Takes what the planning process has found, and starts the next; waits for all of it."""
        while True:
            if self._planning is None and not self._start():
                if not (wait and self._elsewhere):
                    return
                time.sleep(BETWEEN_LOOKS)
            elif wait:
                self.wait(None)
            else:
                self._collect()
                return

    def wait(self, timeout: float | None) -> bool:
        """Waits for the plan in the making; whether there is none any more."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while self._planning is None and self._elsewhere and time.monotonic() < end:
            if not self._start():
                time.sleep(BETWEEN_LOOKS)
        if self._planning is None:
            return not self._elsewhere
        done = self._planning[1].wait(timeout)
        self._collect()
        return done

    def _start(self) -> bool:
        """Begins to search where nobody else does, and takes what others found."""
        self._elsewhere = False
        for number, lesson in enumerate(self.shapes):
            if lesson.trace is None or not lesson.met_again:
                continue
            claim = self._shelf.claim(lesson)
            if claim is None:
                self._elsewhere = True
                continue
            found = self._shelf.same(lesson)
            if found is not None:
                claim.release()
                self.shapes[number] = found
                self._only(found)
                return self._start()
            trace, lesson.trace = lesson.trace, None
            try:
                self._planning = lesson, Planning(trace, self._budget, SECONDS), claim
            except OSError as error:
                claim.release()
                self.note = f"no process to plan in: {error}"
            return self._planning is not None
        return False

    def _collect(self) -> None:
        if self._planning is None:
            return
        lesson, planning, _ = self._planning
        running = planning.running
        route = planning.newest()
        if route is not None:
            lesson.route = route
            self._only(lesson)
        lesson.finished = not running
        if lesson.route is not None and (route is not None or lesson.finished):
            self._shelf.keep(lesson)
        if not running:
            if lesson.route is None:
                self.note = planning.error()
            self._end_planning()

    def _only(self, lesson: Lesson) -> None:
        """No other shape is the same."""
        for other in list(self.shapes):
            if (
                other is not lesson
                and is_of(other.met, lesson.met)
                and is_of(lesson.met, other.met)
            ):
                self.shapes.remove(other)

    def _end_planning(self) -> None:
        if self._planning is not None:
            _, planning, claim = self._planning
            self._planning = None
            planning.stop()
            claim.release()

    def forget(self) -> None:
        """Forgets the shapes, and ends the planning."""
        self.shapes.clear()
        self._end_planning()


_lessons: dict[tuple[Bytes, torch.device, bool, bool], Lessons] = {}


def lessons_for(
    budget: Bytes, device: torch.device, *, cache: bool = True, native: bool = False
) -> Lessons:
    """What this process learned of steps on `device` within `budget`; `cache`: and others.
    `native`: by the native core, whose numbers are others."""
    key = budget, device, cache, native
    found = _lessons.pop(key, None)
    if found is None:
        folder = cache_folder() if cache else None
        found = Lessons(budget, Shelf(folder, budget, device, native=native))
    _lessons[key] = found
    while len(_lessons) > MOST_LESSONS:
        _lessons.pop(next(iter(_lessons))).forget()
    return found


def forget_lessons() -> None:
    """As if nothing had been learned in this process."""
    while _lessons:
        _lessons.popitem()[1].forget()
