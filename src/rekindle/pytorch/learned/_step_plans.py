"""The shapes of steps and their plans, kept from one `rekindle.budget(...)` to the next."""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, NamedTuple, final

import torch

from rekindle._cache import cache_folder
from rekindle._types import Bytes
from rekindle.pytorch.learned._background import SECONDS, Planning
from rekindle.pytorch.learned._plan_cache import Claim, PlanCache
from rekindle.pytorch.learned._sequence_matcher import is_of
from rekindle.pytorch.learned._step_plan import StepPlan

MOST_LESSONS: Final = 8
"""Number of shapes per budget, and of budgets."""
TRIES: Final = 4
"""Number of steps in a row to record after a step of an unknown shape."""
LONGEST_PAUSE: Final = 1024
"""Longest pause (steps): in recording if no shape repeats, in following if plans are left."""
PATIENCE: Final = 12
"""Number of steps of equal length with evictions before a patient learner records."""
MOST_LENGTHS: Final = 64
"""Number of different lengths that a patient learner counts."""
DEARER: Final = 1.1
NOISE: Final = 0.02
"""Tolerated loss with a plan: `DEARER` times the loss without it, plus `NOISE`.

Losses are shares of the computation time, and costs are measured, so small differences mean
nothing.
"""
BETWEEN_LOOKS: Final = 0.05
"""Time (s) between looks while another process searches."""


class _Where(NamedTuple):
    """The conditions that a plan is valid for, in addition to the budget."""

    device: torch.device
    cache: bool


@final
class Lessons:
    """The shapes of steps within one budget, the latest first, and the running search.

    Attributes:
        patient: True if the user did not ask for plans. Steps are then recorded only after steps
            with evictions seem to repeat.
    """

    def __init__(
        self, budget: Bytes, where: _Where, shelf: PlanCache, *, patient: bool = False
    ) -> None:
        self.shapes: list[StepPlan] = []
        self.note = ""  #: why a shape has no plan
        self._budget = budget
        self._where = where
        self._shelf = shelf
        self._planning: tuple[StepPlan, Planning, Claim] | None = None
        self._elsewhere = False  #: another process searches for a plan that is needed here
        self._tries = 0  # number of steps still to record
        self._pause = 0  # number of steps until recording begins again
        self._next_pause = TRIES
        self.patient = patient
        self._lengths: Counter[int] | None = Counter() if patient else None  # see `_waits`
        self._watches = 0  # number of steps that are still of interest
        self._left = 0  # number of steps in a row that left their plan
        self._rest = 0  # number of steps until plans are followed again
        self._next_rest = TRIES

    def within(self, budget: Bytes) -> Lessons:
        """Return the shapes of another budget, with the same conditions."""
        return lessons_for(budget, **self._where._asdict(), patient=self.patient)

    def hurry(self) -> None:
        """Stop being patient, because the user asked for plans."""
        self.patient, self._lengths = False, None

    @property
    def wanted(self) -> bool:
        """True if the next step should be observed at all."""
        return self._watches > 0 or not self.patient

    @property
    def resting(self) -> bool:
        """True if no plan should be followed now, because all recent plans were left."""
        return self._rest > 0

    def wants_more(self) -> bool:
        """Return True if the next step should be recorded."""
        return self._tries > 0 or any(lesson.again for lesson in self.shapes)

    def beginning_with(self, met: int) -> StepPlan | None:
        """Return the latest planned shape that begins with operator `met`, or None."""
        found = self._beginning_with(met)
        if found is None:
            self.shapes += self._shelf.beginning_with(met)
            del self.shapes[MOST_LESSONS:]
            found = self._beginning_with(met)
        return found

    def _beginning_with(self, met: int) -> StepPlan | None:
        """Return the latest planned shape in memory that begins with `met`, or None."""
        for lesson in self.shapes:
            if lesson.route is not None and lesson.met[0] == met:
                return lesson
        return None

    def ended(self, *, evicting: bool, followed: bool, left: bool) -> None:
        """Count a finished step.

        Args:
            evicting: True if it needed evictions.
            followed: True if it followed a plan to its end.
            left: True if it began to follow a plan and left it.
        """
        self._watches = PATIENCE if evicting else max(0, self._watches - 1)
        self._rest = max(0, self._rest - 1)
        if followed:
            self._left, self._next_rest = 0, TRIES
        elif left:
            self._left += 1
            if self._left >= TRIES:
                self._rest = self._next_rest
                self._next_rest = min(2 * self._next_rest, LONGEST_PAUSE)

    def over(self, step: list[int], written: StepPlan | None, loss: float | None = None) -> None:
        """Learn from a finished step that needed evictions and followed no plan to its end.

        If no two steps are alike, recording pauses for longer and longer.

        Args:
            step: The operators of the step.
            written: The recording of the step, or None.
            loss: Recomputation time over computation time, or None if a part followed a plan.
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

    def along(self, lesson: StepPlan, written: StepPlan | None, loss: float) -> None:
        """Learn from a finished step that followed the plan of `lesson` to its end.

        A plan that costs more time than it saves is dropped after `TRIES` such steps.
        """
        self._met_again(lesson, written)
        if lesson.online_loss is None or loss <= DEARER * lesson.online_loss + NOISE:
            lesson.dearer = 0
            return
        lesson.dearer += 1
        if lesson.dearer >= TRIES:
            lesson.route = None
            self.note = "a plan lost more time than the policy alone, and was given up"

    def _met_again(self, lesson: StepPlan, written: StepPlan | None) -> None:
        """Note that a step had the shape of `lesson`, and move it to the front."""
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
        """Return True if a patient learner should not record yet, after `length` operators."""
        if self._lengths is None:
            return False
        self._lengths[length] += 1
        if self._lengths[length] >= PATIENCE:
            self._lengths = None
        elif len(self._lengths) > MOST_LENGTHS:
            self._lengths.clear()
        return True

    # -- searching for plans ----------------------------------------------------------------------

    def plan(self, *, wait: bool) -> None:
        """Take the results of the running search, and start the next one. `wait`: finish all."""
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
        """Wait at most `timeout` seconds for the running search. Return True if none is running."""
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
        """Start a search that no other process makes. Take finished plans of other processes."""
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
        """Take the best plan that the running search has found so far."""
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

    def _only(self, lesson: StepPlan) -> None:
        """Remove all other shapes that equal `lesson`."""
        for other in list(self.shapes):
            if (
                other is not lesson
                and is_of(other.met, lesson.met)
                and is_of(lesson.met, other.met)
            ):
                self.shapes.remove(other)

    def _end_planning(self) -> None:
        """End the running search, and let other processes claim the shape."""
        if self._planning is not None:
            _, planning, claim = self._planning
            self._planning = None
            planning.stop()
            claim.release()

    def forget(self) -> None:
        """Forget all shapes, and end the search."""
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
    """Return the known shapes of steps on `device` within `budget`.

    Patient and other learners share the result. Separate ones would wait for each other's search.

    Args:
        budget: The budget in bytes.
        device: The device.
        cache: Use plans of other processes, and store plans for them.
        patient: True if the user did not ask for plans (see `Lessons`).
    """
    where = _Where(device, cache)
    key = budget, where
    found = _lessons.pop(key, None)
    if found is None:
        folder = cache_folder() if cache else None
        shelf = PlanCache(folder, budget, device)
        found = Lessons(budget, where, shelf, patient=patient)
    if not patient:
        found.hurry()
    _lessons[key] = found
    while len(_lessons) > MOST_LESSONS:
        _lessons.pop(next(iter(_lessons))).forget()
    return found


def forget_lessons() -> None:
    """Forget all shapes of this process (for tests)."""
    while _lessons:
        _lessons.popitem()[1].forget()
