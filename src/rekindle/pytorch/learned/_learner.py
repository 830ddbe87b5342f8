"""Learned schedules: from the second step on, the future is known.

A step begins with the first operator of the graph after an optimizer's step, and ends with the next
one; what comes in between belongs to none. It is written down while it runs within the budget, and
when its like was met again, planned in the background. A step that begins like a planned one then
follows the route, operator by operator, until it ends or does otherwise; then the online policy
decides alone again. A route is advice: nothing but time depends on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from threading import RLock
from typing import Protocol, final

from rekindle._errors import InvalidTrace
from rekindle._types import OpId
from rekindle.engine import Call, Engine, Follower, Host, Storage
from rekindle.pytorch.learned._learning import Ended, Learning
from rekindle.pytorch.learned._lesson import Lesson
from rekindle.pytorch.learned._lessons import Lessons
from rekindle.pytorch.learned._walk import ASIDE, BACKWARD, GRAPH, LOST, Walk, met_by, places
from rekindle.pytorch.online import Capture
from rekindle.pytorch.operators import Invocation
from rekindle.schedule import Action


class Driver(Host, Protocol):
    """What a learner needs of a driver."""

    engine: Engine
    lock: RLock
    stepping: bool
    evictions: int

    @property
    def storages_made(self) -> int: ...

    def perform(self, actions: Iterable[Action]) -> None: ...

    def bring(self, events: Callable[[], Iterable[Action]]) -> None: ...

    def settle(self) -> None: ...

    def also_capture(self) -> Capture: ...

    def capture_no_more(self) -> None: ...


@final
class Learner(Learning):
    """The learner of the core in Python."""

    LONGEST = 1 << 20
    """Operators of a step that are remembered: a program without an optimizer never ends its."""

    def __init__(self, driver: Driver, lessons: Lessons, *, wait: bool) -> None:
        super().__init__(lessons, wait=wait)
        self._driver = driver
        self._lesson: Lesson | None = None
        self._follower: Follower | None = None
        self._begin()

    @property
    def remembered(self) -> int:
        return len(self._met)

    # -- during a step --------------------------------------------------------------------------

    def meets(self, invocation: Invocation) -> None:
        """The program is about to run an operator."""
        self._makes = None
        if self._driver.stepping or self._too_long:  # nobody may see those of the next time
            return
        met = met_by(invocation)
        if not self._met:
            if not met & GRAPH or met & BACKWARD:
                return  # between steps
            self._write_down()
        elif len(self._met) >= self.LONGEST:
            self._give_up()
            return
        self._met.append(met)
        self._made.append(self._driver.storages_made)
        if self._lesson is not None:
            place = self._walk.meets(met)
            if place >= 0:
                self._go_to(self._lesson, place)
            elif place == LOST:
                self._leave(invocation.operator.name)
        elif met & GRAPH:
            self._may_begin(met)
        if self._capture is not None:
            self._starts.append(self._capture.operators)
            self._numbers.append(self._capture.storages)

    def made(self, call: Call) -> None:
        """The program ran an operator, or showed something that it had already."""
        if self._makes is not None and self._follower is not None and call.replayable:
            for storage in call.made:
                self._follower.made(self._makes + storage.id, storage)

    def wanting(self, storage: Storage) -> None:
        """The program asks for `storage`, which is gone."""
        follower, lesson = self._follower, self._lesson
        if follower is not None and lesson is not None:
            at = self._walk.at
            op = lesson.starts[at] if at < len(lesson.starts) else len(follower.route.stops) - 1
            self._perform(lambda: follower.wanting(storage, OpId(op)))

    def _go_to(self, lesson: Lesson, place: int) -> None:
        """The operator that is about to run is number `place` of the lesson."""
        follower, op = self._follower, lesson.starts[place]
        assert follower is not None
        if follower.position < follower.route.stops[op]:
            self._perform(lambda: follower.before(OpId(op)))
        self._makes = lesson.numbers[place] - self._driver.storages_made

    def _perform(self, moves: Callable[[], Iterable[Action]]) -> None:
        """What fails here has not been asked for yet: when it is, it fails then."""
        try:
            self._driver.bring(moves)
        except Exception as error:
            self.why = f"{type(error).__name__} while something was brought back early"
            self._let_go()

    def _leave(self, name: str) -> None:
        """The step does otherwise than its lesson: perhaps as another one, or it begins anew."""
        for other in self.lessons.shapes:
            if other.route is not None and other is not self._lesson:
                found = places(other.met, self._met)
                if found is not None and found[-1] >= 0:
                    self._take(other, found)
                    return
        complete = self._walk.complete
        self._let_go()
        number = len(self._met) - 1
        if complete:
            self._went_on(number)
        else:
            self._was_another(number, name)
        self._may_begin(self._met[-1])

    def _may_begin(self, met: int) -> None:
        """A step of a known shape begins here, if any does with this operator."""
        lesson = self.lessons.beginning_with(met)
        if lesson is not None and not self.lessons.resting:
            self._take(lesson, [ASIDE] * (len(self._met) - 1) + [0])

    def _let_go(self) -> None:
        follower = self._follower
        self._follower = self._lesson = self._makes = None
        if follower is not None:
            self._driver.perform(follower.end())

    def _take(self, lesson: Lesson, found: list[int]) -> None:
        """Follows `lesson` from here on; `found`: what the operators so far are in it."""
        assert lesson.route is not None
        self._let_go()
        driver = self._driver
        driver.settle()  # what was kept for the other lesson alone is gone
        self._taken = True
        self._lesson = lesson
        self._walk = Walk(lesson.met)
        self._walk.at = found[-1] + 1
        self._follower = follower = Follower(driver.engine, lesson.route, driver)
        for storage in driver.engine.storages:
            if storage.id >= self._made[0] and storage.replayable:
                run = bisect_right(self._made, storage.id) - 1
                if found[run] >= 0:
                    number = lesson.numbers[found[run]] + storage.id - self._made[run]
                    follower.made(number, storage)
        self._perform(lambda: follower.skip(OpId(lesson.starts[found[-1]])))
        if self._lesson is lesson:
            self._makes = lesson.numbers[found[-1]] - driver.storages_made

    # -- between steps --------------------------------------------------------------------------

    def step(self) -> None:
        with self._driver.lock:
            self._driver.settle()
            self._end(over=True)
            self._begin()

    def _begin(self) -> None:
        self._met: list[int] = []
        self._starts: list[int] = []
        self._numbers: list[int] = []
        self._made: list[int] = []  # storages before each operator, in the whole run
        self._makes: int | None = None  # what numbers of the lesson have more than those of the run
        self._taken = self._too_long = False
        self._walk = Walk(())
        self._evictions = self._driver.evictions
        self._start_clock(self._driver.engine)
        self._capture: Capture | None = None

    def _write_down(self) -> None:
        """The step begins: if it should be, it is written down from here on."""
        if self.lessons.wants_more():
            self._driver.poll()  # a trace says when the program lets go, not when somebody asks
            self._capture = self._driver.also_capture()

    def _give_up(self) -> None:
        self._let_go()
        self._driver.capture_no_more()
        self._begin()
        self._too_long = True

    def _end(self, *, over: bool) -> None:
        """`over`: by an optimizer's step."""
        evicting = self._driver.evictions > self._evictions
        loss = self._loss(self._driver.engine)
        lesson, complete = self._lesson, self._walk.complete
        ended = Ended(len(self._met), lesson, complete, self._taken, evicting, loss)
        self._count(ended, over=over)
        self._let_go()
        self._driver.capture_no_more()
        self._remember(ended, lambda: self._met, self._written)
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
        return Lesson(self._met, self._starts, self._numbers, trace)
