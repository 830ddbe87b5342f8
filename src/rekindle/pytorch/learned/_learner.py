"""Learned schedules: from the second step on, the future is known.

A step (from one optimizer's step to the next) is written down while it runs within the budget, and
when its like was met again, planned in the background. A step that begins like a planned one then
follows the route, operator by operator, until it ends or does otherwise; then the online policy
decides alone again. A route is advice: nothing but time depends on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from threading import RLock
from typing import Protocol, final

from rekindle._errors import InvalidTrace
from rekindle._types import OpId
from rekindle.engine import Call, Engine, Follower, Host, Route, Storage
from rekindle.pytorch.learned._lessons import Lesson, Lessons
from rekindle.pytorch.online import Capture
from rekindle.pytorch.operators import Signature
from rekindle.schedule import Action


class Driver(Host, Protocol):
    """What a learner needs of a driver."""

    engine: Engine
    lock: RLock
    evictions: int

    @property
    def storages_made(self) -> int: ...

    def perform(self, actions: Iterable[Action]) -> None: ...

    def settle(self) -> None: ...

    def also_capture(self) -> Capture: ...

    def capture_no_more(self) -> None: ...


@final
class Learner:
    """Watches the steps of one run."""

    def __init__(self, driver: Driver, lessons: Lessons, *, wait: bool) -> None:
        self.lessons = lessons
        self.followed = 0  #: steps that went along a route from beginning to end
        self.left = 0  #: steps that left their route
        self.why = ""  #: the last one did
        self.optimizing = False  #: an optimizer's step runs, by which a step of the program ends
        self._driver = driver
        self._wait = wait
        self._lesson: Lesson | None = None
        self._follower: Follower | None = None
        self._begin()

    # -- during a step --------------------------------------------------------------------------

    def meets(self, signature: Signature) -> None:
        """The program is about to run an operator."""
        if self.optimizing:  # nobody may see those of the next time
            return
        at = len(self._signatures)
        self._signatures.append(signature)
        self._made.append(self._driver.storages_made)
        follower, lesson = self._follower, self._lesson
        if follower is not None and lesson is not None:
            if at < len(lesson.signatures) and lesson.signatures[at] is signature:
                op = lesson.starts[at]
                if follower.position < follower.route.stops[op]:
                    self._perform(follower.before(OpId(op)))
            else:
                self._leave(lesson)
        if self._capture is not None:
            self._starts.append(self._capture.operators)
            self._numbers.append(self._capture.storages)

    def made(self, call: Call) -> None:
        """The program ran an operator, or showed something that it had already."""
        follower, lesson = self._follower, self._lesson
        if follower is not None and lesson is not None and self._made:
            number = lesson.numbers[len(self._made) - 1] - self._made[-1]
            for storage in call.made:
                follower.made(number + storage.id, storage)

    def wanting(self, storage: Storage) -> None:
        """The program asks for `storage`, which is gone."""
        follower, lesson = self._follower, self._lesson
        if follower is not None and lesson is not None:
            at = len(self._signatures)
            op = lesson.starts[at] if at < len(lesson.starts) else len(follower.route.stops) - 1
            self._perform(follower.wanting(storage, OpId(op)))

    def _perform(self, actions: Iterable[Action]) -> None:
        """What fails here has not been asked for yet: when it is, it fails then."""
        try:
            self._driver.perform(actions)
        except Exception as error:
            self._stop(f"{type(error).__name__} while something was brought back early")

    def _leave(self, lesson: Lesson) -> None:
        """The step does otherwise than `lesson`: perhaps as another one."""
        for other in self.lessons.shapes:
            if other.route is not None and other.begins_like(self._signatures):
                self._take(other, other.route)
                return
        at = len(self._signatures) - 1
        if at < len(lesson.signatures):
            name = self._signatures[at].operator.name
            self._stop(f"operator {at} of the step was {name}, not as recorded")
        else:
            self._stop(f"the step went on after the {at} operators of the record")

    def _stop(self, why: str) -> None:
        self.left += 1
        self.why = why
        self._let_go()

    def _let_go(self) -> None:
        follower = self._follower
        self._follower = self._lesson = None
        if follower is not None:
            self._driver.perform(follower.end())

    def _take(self, lesson: Lesson, route: Route) -> None:
        """Follows `lesson` from here on."""
        self._let_go()
        driver = self._driver
        self._lesson = lesson
        self._follower = follower = Follower(driver.engine, route, driver)
        if self._made:
            for storage in driver.engine.storages:
                if storage.id >= self._made[0]:
                    run = bisect_right(self._made, storage.id) - 1
                    follower.made(lesson.numbers[run] + storage.id - self._made[run], storage)
            self._perform(follower.skip(OpId(lesson.starts[len(self._signatures) - 1])))

    def told(self) -> str:
        """Lines of a report."""
        lines = [f"steps planned   {self.followed:>11}   followed to the end, {self.left} left"]
        lines += [f"  {note}" for note in (self.why, self.lessons.note) if note]
        return "\n".join(lines)

    # -- between steps --------------------------------------------------------------------------

    def step(self) -> None:
        """A step is over, and another one begins."""
        with self._driver.lock:
            self._driver.settle()
            self._end()
            self._begin()

    def close(self) -> None:
        """The run is over."""
        with self._driver.lock:
            self._end()

    def _begin(self) -> None:
        driver = self._driver
        self._signatures: list[Signature] = []
        self._starts: list[int] = []
        self._numbers: list[int] = []
        self._made: list[int] = []  # storages before each operator, in the whole run
        self._evictions = driver.evictions
        self._capture: Capture | None = None
        if self.lessons.wants_more():
            self._capture = driver.also_capture()
        for lesson in self.lessons.shapes:
            if lesson.route is not None:
                self._take(lesson, lesson.route)
                break

    def _end(self) -> None:
        if self._lesson is not None:
            self.followed += len(self._signatures) == len(self._lesson.signatures)
        self._let_go()
        self._driver.capture_no_more()
        if self._driver.evictions > self._evictions:
            self.lessons.over(self._signatures, self._written())
        self.lessons.plan(wait=self._wait)

    def _written(self) -> Lesson | None:
        capture = self._capture
        if capture is None:
            return None
        try:
            trace = capture.trace()
        except InvalidTrace as error:
            self.why = f"a step could not be written down: {error}"
            return None
        return Lesson(self._signatures, self._starts, self._numbers, trace)
