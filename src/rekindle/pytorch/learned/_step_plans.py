"""Keep recorded training steps and their plans from one `rekindle.budget` to the next.

`StepPlans` decides when to record a step, when to search for a plan, and when to drop a plan.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Final, NamedTuple, final

import torch

from rekindle._cache import cache_folder
from rekindle._types import Bytes
from rekindle.policies import Swap
from rekindle.pytorch.learned._background import SECONDS, Planning
from rekindle.pytorch.learned._plan_cache import Claim, PlanCache
from rekindle.pytorch.learned._step_plan import StepPlan, has_shape
from rekindle.pytorch.learned._step_times import StepTime, Upkeep

MOST_PLANS: Final = 8
"""Most recorded steps to keep per budget, and most budgets to keep them for."""
TRIES: Final = 4
"""Number of successive steps to record once recording begins."""
LONGEST_PAUSE: Final = 1024
"""Longest pause, in steps.

Recording pauses if no step repeats. Following plans pauses if steps deviate from their plans.
"""
PATIENCE: Final = 12
"""Number of steps of equal length before steps are recorded, if the user asked for no plans."""
MOST_LENGTHS: Final = 64
"""Most different step lengths to count before steps are recorded."""
BETWEEN_LOOKS: Final = 0.05
"""Time (s) between checks for a plan that another process is searching for."""


class _Where(NamedTuple):
    """Properties of a budget that plans depend on. Each combination has its own `StepPlans`."""

    device: torch.device
    cache: bool
    """True if plans are stored in the cache folder."""
    swap: Swap | None
    """Host memory and bandwidth, if plans may swap."""


@final
class StepPlans:
    """Recorded steps for one budget, the latest first, and the running search for a plan.

    Attributes:
        patient: True if the user did not ask for plans. Steps are then recorded only after steps
            with evictions seem to repeat.
    """

    def __init__(
        self, budget: Bytes, where: _Where, plan_cache: PlanCache, *, patient: bool = False
    ) -> None:
        self.shapes: list[StepPlan] = []
        self.note = ""  #: why a recorded step has no plan, for `run.report()`
        self.upkeep = Upkeep()
        self._budget = budget
        self._where = where
        self._plan_cache = plan_cache
        self._planning: tuple[StepPlan, Planning, Claim] | None = None
        #: True if another process is searching for a plan that this process needs too
        self._elsewhere = False
        self._tries = 0  # number of further steps to record
        self._pause = 0  # number of steps until recording begins again
        self._next_pause = TRIES
        self.patient = patient
        # Number of operators of a step -> number of such steps, to find out whether steps repeat.
        # None: record steps without finding out.
        self._lengths: Counter[int] | None = Counter() if patient else None
        self._watches = 0  # number of steps that the core observes from now on
        # number of steps in a row that began to follow a plan and then deviated from it
        self._left = 0
        self._rest = 0  # number of steps to run without following plans
        self._next_rest = TRIES

    def within(self, budget: Bytes) -> StepPlans:
        """Return the `StepPlans` for another budget, on the same device with the same settings."""
        return plans_for(budget, **self._where._asdict(), patient=self.patient)

    def hurry(self) -> None:
        """Record steps from now on, even if none repeats yet, because the user asked for plans."""
        self.patient, self._lengths = False, None

    @property
    def wanted(self) -> bool:
        """True if the core should follow or record the next step."""
        if self.patient and not self._watches:
            return False
        return self.upkeep.affordable or any(plan.met_again for plan in self.shapes)

    @property
    def resting(self) -> bool:
        """True if no plan should be followed now, because all recent steps deviated from theirs."""
        return self._rest > 0

    def wants_more(self) -> bool:
        """Return True if the next step should be recorded."""
        more = self._tries > 0 and self.upkeep.affordable
        return more or any(plan.again for plan in self.shapes)

    def beginning_with(self, op_id: int) -> StepPlan | None:
        """Return the latest plan for steps whose first operator is `op_id`, or None.

        If no such plan is in memory, stored plans are loaded from the cache folder.
        """
        found = self._beginning_with(op_id)
        if found is None:
            self.shapes += self._plan_cache.beginning_with(op_id)
            del self.shapes[MOST_PLANS:]
            found = self._beginning_with(op_id)
        return found

    def _beginning_with(self, op_id: int) -> StepPlan | None:
        """Return the latest plan in memory for steps whose first operator is `op_id`, or None."""
        for plan in self.shapes:
            if plan.followed is not None and plan.op_ids[0] == op_id:
                return plan
        return None

    def ended(self, *, evicting: bool, followed: bool, left: bool) -> None:
        """Count a finished step, to decide if the core observes later steps and follows plans.

        Args:
            evicting: True if the step needed evictions.
            followed: True if the step followed a plan to its end.
            left: True if the step began to follow a plan and then deviated from it.
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

    def over(self, step: list[int], written: StepPlan | None, time: StepTime | None = None) -> None:
        """Learn from a finished step that needed evictions and followed no plan to its end.

        If no two steps run the same operators, the pauses in recording become longer and longer.

        Args:
            step: The numbers of the step's operators.
            written: The recording of the step, or None.
            time: The time of the step. None if it is unknown, or if a part of the step followed a
                plan.
        """
        if self._waits(len(step)):
            return
        for plan in self.shapes:
            if has_shape(plan.op_ids, step):
                # A step that is recorded takes longer.
                if time is not None and written is None:
                    plan.times.ran_without_plan(time)
                self._met_again(plan, written)
                return
        if written is not None:
            self.shapes.insert(0, written)
            del self.shapes[MOST_PLANS:]
            self._tries -= 1
            if self._tries == 0:
                self._pause = self._next_pause
                self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        elif self._pause > 0:
            self._pause -= 1
        elif self._tries == 0:
            self._tries = TRIES

    def along(self, plan: StepPlan, written: StepPlan | None, time: StepTime | None) -> None:
        """Learn from a finished step that followed `plan` to its end.

        Args:
            plan: The plan that the step followed.
            written: The recording of the step, or None.
            time: The time of the step, or None if it is unknown.
        """
        self._met_again(plan, written)
        if time is not None and written is None:
            plan.times.ran_with_plan(time)

    def left(self) -> list[str]:
        """Return for each plan that is left because of its time what was compared."""
        return [
            f"the plan of steps of {len(plan.op_ids)} operators that begin with "
            f"{plan.begins_with} was left: {plan.times.verdict}"
            for plan in self.shapes
            if plan.times.verdict
        ]

    def _met_again(self, plan: StepPlan, written: StepPlan | None) -> None:
        """Record that another step had the operators of `plan`, and move `plan` to the front.

        A repeated step is worth the search for a plan.
        """
        plan.met_again = True
        if plan in self.shapes:
            self.shapes.remove(plan)
        self.shapes.insert(0, plan)
        if plan.again and written is not None:
            plan.again, written.met_again = False, True
            self.shapes.insert(1, written)
        self._tries = max(0, self._tries - 1)
        self._pause, self._next_pause = 0, TRIES

    def _waits(self, length: int) -> bool:
        """Count a step of `length` operators. Return True if recording must wait.

        Recording waits until steps of one length have occurred `PATIENCE` times.
        """
        if self._lengths is None:
            return False
        self._lengths[length] += 1
        if self._lengths[length] >= PATIENCE:
            self._lengths = None
        elif len(self._lengths) > MOST_LENGTHS:
            self._lengths.clear()
        return True

    # -- searching for plans ----------------------------------------------------------------------

    def search(self, *, wait: bool) -> None:
        """Use the best plan that the running search has found, or start the next search.

        Args:
            wait: If True, wait until all searches have ended.
        """
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
        """Wait at most `timeout` seconds for the running search. Return True if it has ended."""
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
        """Start the next search for a plan, unless another process searches for the same plan.

        A final plan that another process has found is taken from the cache folder.

        Returns:
            True if a search was started.
        """
        self._elsewhere = False
        for number, plan in enumerate(self.shapes):
            if plan.trace is None or not plan.met_again:
                continue
            claim = self._plan_cache.claim(plan)
            if claim is None:
                self._elsewhere = True
                continue
            found = self._plan_cache.same(plan)
            if found is not None:
                claim.release()
                found.times = plan.times
                found.times.begin()
                self.shapes[number] = found
                self._only(found)
                return self._start()
            trace, plan.trace = plan.trace, None
            try:
                planning = Planning(trace, self._budget, SECONDS, self._where.swap)
                self._planning = plan, planning, claim
            except OSError as error:
                claim.release()
                self.note = f"the planning process cannot be started: {error}"
            return self._planning is not None
        return False

    def _collect(self) -> None:
        """Use the best plan that the running search has found so far."""
        if self._planning is None:
            return
        plan, planning, _ = self._planning
        running = planning.running
        route = planning.newest()
        if route is not None:
            plan.found(route)
            self._only(plan)
        plan.finished = not running
        if plan.route is not None and (route is not None or plan.finished):
            self._plan_cache.keep(plan)
        if not running:
            if plan.route is None:
                self.note = planning.error()
            self._end_planning()

    def _only(self, plan: StepPlan) -> None:
        """Remove all other plans for steps with the same operators as `plan`."""
        for other in list(self.shapes):
            if (
                other is not plan
                and has_shape(other.op_ids, plan.op_ids)
                and has_shape(plan.op_ids, other.op_ids)
            ):
                self.shapes.remove(other)

    def _end_planning(self) -> None:
        """End the running search, and release its claim, so that other processes may search."""
        if self._planning is not None:
            _, planning, claim = self._planning
            self._planning = None
            planning.stop()
            claim.release()

    def forget(self) -> None:
        """Drop all recorded steps and plans, and end the running search."""
        self.shapes.clear()
        self._end_planning()


_plans: dict[tuple[Bytes, _Where], StepPlans] = {}


def plans_for(
    budget: Bytes,
    device: torch.device,
    *,
    cache: bool = True,
    patient: bool = False,
    swap: Swap | None = None,
) -> StepPlans:
    """Return the `StepPlans` for a budget and a device: one object per process.

    All `Learner`s of the process share this object, because separate objects would wait for each
    other's search.

    Args:
        budget: The budget in bytes.
        device: The device.
        cache: Use plans of other processes from the cache folder, and store plans there.
        patient: True if the user did not ask for plans (see `StepPlans`).
        swap: Host memory and bandwidth, if plans may swap.
    """
    where = _Where(device, cache, swap)
    key = budget, where
    found = _plans.pop(key, None)
    if found is None:
        folder = cache_folder() if cache else None
        plan_cache = PlanCache(folder, budget, device, swap)
        found = StepPlans(budget, where, plan_cache, patient=patient)
    if not patient:
        found.hurry()
    _plans[key] = found
    while len(_plans) > MOST_PLANS:
        _plans.pop(next(iter(_plans))).forget()
    return found
