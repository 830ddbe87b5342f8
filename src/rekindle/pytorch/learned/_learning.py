"""What every learner keeps of the steps of one run: how they went, and what is told of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.learned._lesson import Lesson
from rekindle.pytorch.learned._lessons import Lessons

Written = Callable[[], Lesson | None]


class Ended(NamedTuple):
    """How a step ended."""

    length: int
    """Operators, as far as they are remembered."""
    lesson: Lesson | None
    """The one that was followed when it ended."""
    complete: bool
    """Nothing was missing of that."""
    taken: bool
    """A lesson was followed for a part of the step at least."""
    evicting: bool
    """Something was evicted meanwhile."""
    loss: float
    """Recomputation over computation."""


class Engine(Protocol):
    """What says how long things took."""

    @property
    def compute_ns(self) -> Nanoseconds: ...

    @property
    def recompute_ns(self) -> Nanoseconds: ...


class Learning(ABC):
    """Watches the steps of one run, and makes of them what `lessons` are about."""

    _driver: Any  #: of the run

    def __init__(self, lessons: Lessons, *, wait: bool) -> None:
        self.lessons = lessons
        self.followed = 0  #: steps that went along a route from beginning to end
        self.left = 0  #: steps that left their route
        self.unplanned = 0  #: steps for which there was none
        self.why = ""  #: the last one left its route
        self._wait = wait

    @property
    @abstractmethod
    def remembered(self) -> int:
        """Operators of the step that runs, as far as they are remembered."""

    @abstractmethod
    def step(self) -> None:
        """A step is over, and another one begins."""

    @abstractmethod
    def _begin(self) -> None:
        """A step begins. With the driver's lock."""

    @abstractmethod
    def _end(self, *, over: bool) -> None:
        """It is over; `over`: by an optimizer's step. With the driver's lock."""

    def close(self) -> None:
        """The run is over."""
        with self._driver.lock:
            self._end(over=False)

    def within(self, budget: Bytes) -> None:
        """From now on the budget is another one: plans for the old one are of no use."""
        with self._driver.lock:
            self._end(over=False)
            self.lessons = self.lessons.within(budget)
            self._begin()

    def wait(self, timeout: float | None) -> bool:
        """Waits for the plan in the making; whether there is none any more."""
        return self.lessons.wait(timeout)

    def told(self) -> str:
        """Lines of a report; none where nobody asked for plans and there was nothing to plan."""
        if self.lessons.patient and not self.lessons.shapes:
            return ""
        share = self.followed / max(1, self.followed + self.left + self.unplanned)
        told = f"steps planned   {self.followed:>11}   followed to the end, {self.left} left"
        lines = [f"{told}, {self.unplanned} without a plan: {share:.0%} of the steps followed"]
        lines += [f"  {note}" for note in (self.why, self.lessons.note) if note]
        return "\n".join(lines)

    def _start_clock(self, engine: Engine) -> None:
        """A step begins."""
        self._before = engine.compute_ns, engine.recompute_ns

    def _loss(self, engine: Engine) -> float:
        """Recomputation over computation since then."""
        computed, recomputed = self._before
        return (engine.recompute_ns - recomputed) / max(1, engine.compute_ns - computed)

    def _count(self, step: Ended, *, over: bool) -> None:
        """`over`: by an optimizer's step."""
        followed = step.lesson is not None and step.complete
        self.lessons.ended(
            evicting=step.evicting, followed=followed, left=step.taken and not followed
        )
        if followed:
            self.followed += 1
        elif step.lesson is not None and over:
            self.why = f"the step ended after {step.length} operators of {len(step.lesson.met)}"
            self.left += 1
        else:
            self.left += step.taken
            self.unplanned += over and not step.taken

    def _remember(self, step: Ended, met: Callable[[], list[int]], written: Written) -> None:
        """What came of a step that needed evictions. `met`: its operators; `written`: what was
        written down of it."""
        if not step.length or not step.evicting:
            return
        if step.lesson is not None and step.complete:
            self.lessons.along(step.lesson, written() if step.lesson.again else None, step.loss)
        else:
            self.lessons.over(met(), written(), None if step.taken else step.loss)

    def _went_on(self, number: int) -> None:
        self.why = f"the step went on after the {number} operators of the record"

    def _was_another(self, number: int, name: str) -> None:
        self.why = f"operator {number} of the step was {name}, not as recorded"
