"""Connect learned plans with the native core: pass plans to the core, collect finished steps.

The core follows plans and records steps while they run. This file acts between two steps.
"""

from __future__ import annotations

from array import array
from itertools import count
from threading import RLock
from types import ModuleType
from typing import Any, NamedTuple, Protocol, final

from rekindle._errors import InvalidTrace
from rekindle.engine import Route
from rekindle.pytorch.learned._learning import Engine, Learning, StepOutcome
from rekindle.pytorch.learned._step_plan import StepPlan
from rekindle.pytorch.learned._step_plans import StepPlans
from rekindle.pytorch.native import Transcript, written_down


class Driver(Protocol):
    """The attributes of the native driver that `NativeLearner` uses."""

    core: ModuleType
    handle: Any
    lock: RLock

    @property
    def evictions(self) -> int: ...

    @property
    def engine(self) -> Engine: ...


class _Ended(NamedTuple):
    """A finished step as the core returns it: how far it followed the plan `key`, and why not."""

    key: int
    complete: bool
    taken: bool
    length: int
    reason: str
    number: int
    name: str


@final
class NativeLearner(Learning):
    """The `Learning` of one run of the native core."""

    def __init__(self, driver: Driver, plans: StepPlans, *, wait: bool) -> None:
        super().__init__(plans, wait=wait)
        self._driver = driver
        self._core, self._handle = driver.core, driver.handle
        self._keys = count()
        self._taught: dict[StepPlan, tuple[int, Route]] = {}
        self._begin()

    @property
    def remembered(self) -> int:
        return self._core.remembered(self._handle)

    def begins(self, met: int) -> None:
        """Load stored plans of steps whose first operator is `met`."""
        with self._driver.lock:
            if self.plans.beginning_with(met) is not None:
                self._teach()

    def wait(self, timeout: float | None) -> bool:
        done = super().wait(timeout)
        with self._driver.lock:
            self._teach()
        return done

    def step(self) -> None:
        with self._driver.lock:
            self._end(over=True)
            self._begin()

    def _begin(self) -> None:
        """Pass the plans to the core, and let it follow or record the next step."""
        self._evictions = self._driver.evictions
        self._start_clock(self._driver.engine)
        if self.plans.wanted:
            self._teach()
            self._core.begin_step(self._handle, self.plans.wants_more())

    def _end(self, *, over: bool) -> None:
        """End the core's step, count it, and continue the search for plans."""
        said = _Ended(*self._core.end_step(self._handle))
        self._understand(said)
        evicting = self._driver.evictions > self._evictions
        plan = self._plan_of(said.key)
        loss = self._loss(self._driver.engine)
        ended = StepOutcome(said.length, plan, said.complete, said.taken, evicting, loss)
        self._count(ended, over=over)
        self._remember(ended, self._met, self._written)
        self.plans.search(wait=self._wait)

    def _understand(self, said: _Ended) -> None:
        """Note why the finished step `said` left its plan, if it did."""
        match said.reason:
            case "went on":
                self._went_on(said.number)
            case "another":
                self._was_another(said.number, said.name)
            case "failed":
                self.why = "a value could not be restored ahead of its use"

    def _plan_of(self, key: int) -> StepPlan | None:
        """Return the plan that was passed to the core under the number `key`, or None."""
        return next((plan for plan, known in self._taught.items() if known[0] == key), None)

    def _met(self) -> list[int]:
        """Return the operators of the last step, as numbers."""
        met = array("q")
        met.frombytes(self._core.met_in_step(self._handle))
        return met.tolist()

    def _written(self) -> StepPlan | None:
        """Return the recording of the last step, or None."""
        words = self._core.written_in_step(self._handle)
        if words is None:
            return None
        try:
            trace, starts, numbers = written_down(Transcript(*words))
        except InvalidTrace as error:
            self.why = f"the recording of a step is no valid trace: {error}"
            return None
        return StepPlan(self._met(), starts, numbers, trace)

    def _teach(self) -> None:
        """Make the core know exactly the current plans. While plans are resting: none."""
        taught: dict[StepPlan, tuple[int, Route]] = {}
        for plan in () if self.plans.resting else self.plans.shapes:
            route = plan.route
            if route is None:
                continue
            known = self._taught.get(plan)
            if known is None or known[1] is not route:
                known = next(self._keys) if known is None else known[0], route
                self._core.teach(
                    self._handle, known[0], plan.met, plan.starts, plan.numbers,
                    _numbers_of(route),
                )  # fmt: skip
            taught[plan] = known
        self._taught = taught
        self._core.know(self._handle, [key for key, _ in taught.values()])


def _numbers_of(route: Route) -> tuple[list[int], ...]:
    """Return the fields of a `Route` as lists of numbers, with nested tuples flattened."""
    restores, restored = [0], list[int]()
    for made in route.restores:
        restored += made
        restores.append(len(restored))
    return list(route.stops), list(route.moves), restores, restored, list(route.kept)
