"""What is remembered of steps, from one `rekindle.budget(...)` to the next."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, NamedTuple, final

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
"""Steps without writing down, at most, where no shape was ever met twice; and without following,
where no plan was followed to its end."""
PATIENCE: Final = 12
"""Steps of one length that needed evictions, before those who are patient write any down."""
MOST_LENGTHS: Final = 64
"""Lengths of steps that are told apart until then."""
DEARER: Final = 1.1
NOISE: Final = 0.02
"""A step may lose so many times what it lost without its plan, and so much of the time it takes
besides: prices are measured."""
BETWEEN_LOOKS: Final = 0.05
"""Seconds, while another process searches."""


class _Where(NamedTuple):
    """What a schedule is good for, but for the budget."""

    device: torch.device
    cache: bool


@final
class Lessons:
    """The shapes of steps within one budget, the one met last first, and the plan in the making.

    patient: steps are watched once one needed evictions, and written down once they seem to go on
        like that; where nobody asked for plans.
    """

    def __init__(
        self, budget: Bytes, where: _Where, shelf: Shelf, *, patient: bool = False
    ) -> None:
        self.shapes: list[Lesson] = []
        self.note = ""  #: why a shape has no route
        self._budget = budget
        self._where = where
        self._shelf = shelf
        self._planning: tuple[Lesson, Planning, Claim] | None = None
        self._elsewhere = False  #: another process searches for what is needed here
        self._tries = 0
        self._pause = 0
        self._next_pause = TRIES
        self.patient = patient
        self._lengths: Counter[int] | None = Counter() if patient else None
        self._watches = 0  # so many steps more
        self._left = 0  # steps in a row that left their plan
        self._rest = 0
        self._next_rest = TRIES

    def within(self, budget: Bytes) -> Lessons:
        """Those of another budget, with everything else the same."""
        return lessons_for(budget, **self._where._asdict(), patient=self.patient)

    def hurry(self) -> None:
        """Somebody asks for plans: no more patience."""
        self.patient, self._lengths = False, None

    @property
    def wanted(self) -> bool:
        """Whether the next step is of interest at all."""
        return self._watches > 0 or not self.patient

    @property
    def resting(self) -> bool:
        """Whether no plan is to be followed now, as the last ones all were left."""
        return self._rest > 0

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

    def ended(self, *, evicting: bool, followed: bool, left: bool) -> None:
        """A step of the program is over. `evicting`: it needed evictions; `followed`: a plan, to
        its end; `left`: it began along one."""
        self._watches = PATIENCE if evicting else max(0, self._watches - 1)
        self._rest = max(0, self._rest - 1)
        if followed:
            self._left, self._next_rest = 0, TRIES
        elif left:
            self._left += 1
            if self._left >= TRIES:
                self._rest = self._next_rest
                self._next_rest = min(2 * self._next_rest, LONGEST_PAUSE)

    def over(self, step: list[int], written: Lesson | None, loss: float | None = None) -> None:
        """A step that needed evictions is over, which followed no plan to its end; `written`: what
        was written down of it; `loss`: recomputation over computation, if the policy decided
        alone.

        Where no two steps are alike, writing down is given up for longer and longer.
        """
        if self._waits(len(step)):
            return
        for lesson in self.shapes:
            if is_of(lesson.met, step):
                lesson.lost_online(loss)
                self._met_again(lesson, written)
                return
        if written is not None:
            written.lost_online(loss)
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

    def along(self, lesson: Lesson, written: Lesson | None, loss: float) -> None:
        """Likewise, where it followed the plan of `lesson` to its end. A plan that costs more than
        it saves is given up."""
        self._met_again(lesson, written)
        if lesson.online_loss is None or loss <= DEARER * lesson.online_loss + NOISE:
            lesson.dearer = 0
            return
        lesson.dearer += 1
        if lesson.dearer >= TRIES:
            lesson.route = None
            self.note = "a plan lost more time than the policy alone, and was given up"

    def _met_again(self, lesson: Lesson, written: Lesson | None) -> None:
        lesson.met_again = True
        if lesson in self.shapes:
            self.shapes.remove(lesson)
        self.shapes.insert(0, lesson)
        if lesson.again and written is not None:
            lesson.again, written.met_again = False, True
            self.shapes.insert(1, written)
        self._tries = max(0, self._tries - 1)
        self._pause, self._next_pause = 0, TRIES

    def _waits(self, length: int) -> bool:
        """Whether it is too early to write anything down, after a step of `length` operators."""
        if self._lengths is None:
            return False
        self._lengths[length] += 1
        if self._lengths[length] >= PATIENCE:
            self._lengths = None
        elif len(self._lengths) > MOST_LENGTHS:
            self._lengths.clear()
        return True

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
            lesson.route, lesson.dearer = route, 0
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


_lessons: dict[tuple[Bytes, _Where], Lessons] = {}


def lessons_for(
    budget: Bytes,
    device: torch.device,
    *,
    cache: bool = True,
    patient: bool = False,
) -> Lessons:
    """What this process learned of steps on `device` within `budget`; `cache`: and others.

    `patient`: as of `Lessons`; who is not has what the patient learned: two would wait for each
    other's search.
    """
    where = _Where(device, cache)
    key = budget, where
    found = _lessons.pop(key, None)
    if found is None:
        folder = cache_folder() if cache else None
        shelf = Shelf(folder, budget, device)
        found = Lessons(budget, where, shelf, patient=patient)
    if not patient:
        found.hurry()
    _lessons[key] = found
    while len(_lessons) > MOST_LESSONS:
        _lessons.pop(next(iter(_lessons))).forget()
    return found


def forget_lessons() -> None:
    """As if nothing had been learned in this process."""
    while _lessons:
        _lessons.popitem()[1].forget()
