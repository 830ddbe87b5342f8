"""Pass learned plans to the native core, and collect the steps that the core recorded.

The core follows plans and records training steps while they run. This file acts between two steps.
It counts how many steps followed a plan, and notes why others did not.
"""

from __future__ import annotations

from array import array
from itertools import count
from threading import get_ident
from typing import NamedTuple, final

from rekindle import _clock
from rekindle._errors import InvalidTrace
from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import Route
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.learned._step_plan import StepPlan
from rekindle.pytorch.learned._step_plans import StepPlans
from rekindle.pytorch.learned._step_times import StepTime
from rekindle.pytorch.native import Driver, RouteNumbers, Transcript


class _Ended(NamedTuple):
    """The core's report of a finished step: how far it followed its plan, and why not further."""

    key: int
    complete: bool
    taken: bool
    length: int
    processor_ns: int
    reason: str
    number: int
    name: str


class _Step(NamedTuple):
    """A finished training step: its length, how far it followed a plan, and its time."""

    length: int
    """Number of operators of the step that the core recorded."""
    plan: StepPlan | None
    """The plan that was followed at the end of the step, or None."""
    complete: bool
    """True if the step ran all operators that `plan` expects."""
    taken: bool
    """True if the step followed a plan, at least for a part of its operators."""
    evicting: bool
    """True if at least one storage was evicted during the step."""
    time: StepTime | None
    """The time of the step, if it is known."""


@final
class Learner:
    """The learned plans that the native core follows in one budget, and statistics of steps."""

    def __init__(self, driver: Driver, plans: StepPlans, *, wait: bool) -> None:
        self.plans = plans
        self.followed = 0  #: number of steps that followed a plan from beginning to end
        self.left = 0  #: number of steps that began to follow a plan and then deviated from it
        self.unplanned = 0  #: number of steps without a plan
        self.why = ""  #: why a step last stopped following its plan
        self._wait = wait
        self._driver = driver
        self._core, self._handle = driver.core, driver.handle
        self._keys = count()
        # plans that the native core knows now, with the key and the `Route` passed to the core
        self._added: dict[StepPlan, tuple[int, Route]] = {}
        self._begin()

    @property
    def remembered(self) -> int:
        """Number of operators of the running step that are recorded so far."""
        return self._core.remembered(self._handle)

    def begins(self, op_id: int) -> None:
        """Load stored plans for steps that begin with operator `op_id`; pass them to the core."""
        with self._driver.lock:
            if self.plans.beginning_with(op_id) is not None:
                self._add_plans()

    def step(self) -> None:
        """Finish the training step that ends here, and begin the next one."""
        with self._driver.lock:
            ended_ns = _clock.thread_now()
            program_ns = ended_ns - self._begun_ns if self._thread == get_ident() else 0
            self._end(over=True)
            self._begin()
            self.plans.upkeep.add(self._begun_ns - ended_ns, program_ns)

    def close(self) -> None:
        """Finish the last step, because the `rekindle.budget` block ends."""
        with self._driver.lock:
            self._end(over=False)

    def within(self, budget: Bytes) -> None:
        """Change the budget in bytes. Plans for the old budget are not used any more."""
        with self._driver.lock:
            self._end(over=False)
            self.plans = self.plans.within(budget)
            self._begin()

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the search for plans. Return True if it has ended."""
        done = self.plans.wait(timeout)
        with self._driver.lock:
            self._add_plans()
        return done

    def summary(self) -> str:
        """Return the lines about plans in `run.report()`.

        The text is empty if the user did not ask for plans and no step was recorded.
        """
        if self.plans.patient and not self.plans.shapes:
            return ""
        share = self.followed / max(1, self.followed + self.left + self.unplanned)
        planned = (
            f"steps planned   {self.followed:>11}   followed to the end, {self.left} abandoned"
        )
        lines = [f"{planned}, {self.unplanned} without a plan: {share:.0%} of the steps followed"]
        notes = (self.why, self.plans.note, *self.plans.left())
        lines += [f"  {note}" for note in notes if note]
        return "\n".join(lines)

    # -- between two steps; the caller holds the driver's lock ----------------------------------

    def _begin(self) -> None:
        """Pass the plans to the core, and make the core follow or record the next step."""
        self._evictions = self._driver.evictions
        engine = self._driver.engine
        self._before = engine.compute_ns, engine.recompute_ns, self._waiting_ns()
        if self.plans.wanted:
            self._add_plans()
            self._core.begin_step(self._handle, self.plans.wants_more())
        self._thread, self._begun_ns = get_ident(), _clock.thread_now()

    def _end(self, *, over: bool) -> None:
        """End the running step in the core, count it, and continue the search for plans.

        Args:
            over: True if `optimizer.step()` ended the step. False if the end or a change of the
                budget did.
        """
        ended = _Ended(*self._core.end_step(self._handle))
        self._note_reason(ended)
        evicting = self._driver.evictions > self._evictions
        plan = self._plan_of(ended.key)
        step = _Step(ended.length, plan, ended.complete, ended.taken, evicting, self._time(ended))
        self._count(step, over=over)
        self._remember(step)
        self.plans.search(wait=self._wait)

    def _note_reason(self, ended: _Ended) -> None:
        """Record why the finished step stopped following its plan, if it did."""
        match ended.reason:
            case "went on":
                self.why = f"the step ran more than the {ended.number} operators of its plan"
            case "another":
                number, name = ended.number, ended.name
                self.why = (
                    f"operator {number} of the step was {name}, another one than in the recorded "
                    "step"
                )
            case "failed":
                self.why = "a value could not be restored ahead of its use"

    def _plan_of(self, key: int) -> StepPlan | None:
        """Return the plan that was passed to the core with the number `key`, or None."""
        return next((plan for plan, added in self._added.items() if added[0] == key), None)

    def _time(self, ended: _Ended) -> StepTime | None:
        """Return the time of the finished step, or None if it is unknown or does not matter.

        With `learn="wait"`, steps follow each plan, so that a second run does the same. On an
        accelerator, operators run while the program's thread issues the next ones. So a step takes
        the longer of both times.
        """
        if self._wait or ended.processor_ns < 0:
            return None
        engine, (computed, recomputed, waited) = self._driver.engine, self._before
        recomputing, waiting = engine.recompute_ns - recomputed, self._waiting_ns() - waited
        busy = ended.processor_ns
        if is_accelerator(self._driver.device):
            busy = max(busy, engine.compute_ns - computed + recomputing)
        return StepTime(busy + waiting, recomputing, waiting)

    def _waiting_ns(self) -> Nanoseconds:
        """Return how long the program has waited for swap transfers so far."""
        transfers = self._driver.transfers
        return 0 if transfers is None else transfers.waiting_ns

    def _count(self, step: _Step, *, over: bool) -> None:
        """Count a finished step by whether it followed a plan to the end, in part, or not at all.

        Args:
            step: The finished step.
            over: True if `optimizer.step()` ended the step.
        """
        followed = step.plan is not None and step.complete
        self.plans.ended(
            evicting=step.evicting, followed=followed, left=step.taken and not followed
        )
        if followed:
            self.followed += 1
        elif step.plan is not None and over:
            planned = len(step.plan.op_ids)
            self.why = f"the step ended after {step.length} of the plan's {planned} operators"
            self.left += 1
        else:
            self.left += step.taken
            self.unplanned += over and not step.taken

    def _remember(self, step: _Step) -> None:
        """Pass a finished step to `plans`, to learn from it, if the step needed evictions."""
        if not step.length or not step.evicting:
            return
        if step.plan is not None and step.complete:
            recorded = self._recording() if step.plan.again else None
            self.plans.along(step.plan, recorded, step.time)
        else:
            self.plans.over(self._op_ids(), self._recording(), None if step.taken else step.time)

    def _op_ids(self) -> list[int]:
        """Return the numbers that identify the operators of the last step, in order."""
        op_ids = array("q")
        op_ids.frombytes(self._core.op_ids_of_step(self._handle))
        return op_ids.tolist()

    def _recording(self) -> StepPlan | None:
        """Return the last step as a `StepPlan` without a plan, or None if it was not recorded."""
        words = self._core.recording_of_step(self._handle)
        if words is None:
            return None
        try:
            trace, starts, numbers = Transcript(*words).trace()
        except InvalidTrace as error:
            self.why = f"the recording of a step is no valid trace: {error}"
            return None
        first = next((op.name for op in trace.ops[starts[0] :]), "")
        return StepPlan(self._op_ids(), starts, numbers, trace, begins_with=first)

    def _add_plans(self) -> None:
        """Make the native core know exactly the current plans, or none while they are suspended."""
        added: dict[StepPlan, tuple[int, Route]] = {}
        for plan in () if self.plans.resting else self.plans.shapes:
            route = plan.route if self._wait else plan.followed
            if route is None:
                continue
            known = self._added.get(plan)
            if known is None or known[1] is not route:
                known = next(self._keys) if known is None else known[0], route
                self._core.add_plan(
                    self._handle, known[0], plan.op_ids, plan.starts, plan.numbers,
                    _numbers_of(route),
                )  # fmt: skip
            added[plan] = known
        self._added = added
        self._core.retain_plans(self._handle, [key for key, _ in added.values()])


def _numbers_of(route: Route) -> RouteNumbers:
    """Return the fields of a `Route` as lists of numbers, with nested tuples flattened."""
    restores, restored = [0], list[int]()
    for made in route.restores:
        restored += made
        restores.append(len(restored))
    stops, moves = list(route.stops), list(route.moves)
    return stops, moves, restores, restored, list(route.kept), list(route.copies)
