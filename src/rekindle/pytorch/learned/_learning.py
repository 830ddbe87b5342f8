"""Statistics of the training steps of one run: how many followed a plan, and why others did not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.learned._step_plan import StepPlan
from rekindle.pytorch.learned._step_plans import StepPlans

Written = Callable[[], StepPlan | None]


class StepOutcome(NamedTuple):
    """A finished training step: its length, and how far it followed a plan."""

    length: int
    """Number of recorded operators of the step."""
    plan: StepPlan | None
    """The plan that was followed at the end of the step, or None."""
    complete: bool
    """True if the step ran all operators that `plan` expects."""
    taken: bool
    """True if the step followed a plan, at least for a part of its operators."""
    evicting: bool
    """True if at least one storage was evicted during the step."""
    loss: float
    """Recomputation time divided by computation time."""


class Engine(Protocol):
    """The clocks of an engine (ns)."""

    @property
    def compute_ns(self) -> Nanoseconds: ...

    @property
    def recompute_ns(self) -> Nanoseconds: ...


class Learning(ABC):
    """Count the steps of one run, and pass each finished step to `plans`."""

    _driver: Any  #: the driver of the run

    def __init__(self, plans: StepPlans, *, wait: bool) -> None:
        self.plans = plans
        self.followed = 0  #: number of steps that followed a plan from beginning to end
        self.left = 0  #: number of steps that left their plan
        self.unplanned = 0  #: number of steps without a plan
        self.why = ""  #: why a step last left its plan
        self._wait = wait

    @property
    @abstractmethod
    def remembered(self) -> int:
        """Number of operators of the running step that are recorded so far."""

    @abstractmethod
    def step(self) -> None:
        """Finish a step, and begin the next one."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin a step. The caller holds the driver's lock."""

    @abstractmethod
    def _end(self, *, over: bool) -> None:
        """Finish a step. The caller holds the driver's lock.

        Args:
            over: True if `optimizer.step()` ended the step, False if the run or its budget did.
        """

    def close(self) -> None:
        """Finish the last step, because the run ends."""
        with self._driver.lock:
            self._end(over=False)

    def within(self, budget: Bytes) -> None:
        """Change the budget in bytes. Plans for the old budget are not used any more."""
        with self._driver.lock:
            self._end(over=False)
            self.plans = self.plans.within(budget)
            self._begin()

    def wait(self, timeout: float | None) -> bool:
        """Wait at most `timeout` seconds for the search for a plan. Return True if it has ended."""
        return self.plans.wait(timeout)

    def told(self) -> str:
        """Return the lines about plans in `run.report()`.

        The result is empty if the user did not ask for plans and no step was recorded.
        """
        if self.plans.patient and not self.plans.shapes:
            return ""
        share = self.followed / max(1, self.followed + self.left + self.unplanned)
        told = f"steps planned   {self.followed:>11}   followed to the end, {self.left} left"
        lines = [f"{told}, {self.unplanned} without a plan: {share:.0%} of the steps followed"]
        lines += [f"  {note}" for note in (self.why, self.plans.note) if note]
        return "\n".join(lines)

    def _start_clock(self, engine: Engine) -> None:
        """Store the engine's clocks at the start of a step."""
        self._before = engine.compute_ns, engine.recompute_ns

    def _loss(self, engine: Engine) -> float:
        """Return recomputation time divided by computation time since the start of the step."""
        computed, recomputed = self._before
        return (engine.recompute_ns - recomputed) / max(1, engine.compute_ns - computed)

    def _count(self, step: StepOutcome, *, over: bool) -> None:
        """Count a finished step as followed, left or unplanned.

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
            self.why = f"the step ended after {step.length} operators of {len(step.plan.met)}"
            self.left += 1
        else:
            self.left += step.taken
            self.unplanned += over and not step.taken

    def _remember(self, step: StepOutcome, met: Callable[[], list[int]], written: Written) -> None:
        """Pass a finished step to `plans`, if the step needed evictions.

        Args:
            step: The finished step.
            met: Returns the operators of the step, as numbers.
            written: Returns the recording of the step, or None.
        """
        if not step.length or not step.evicting:
            return
        if step.plan is not None and step.complete:
            self.plans.along(step.plan, written() if step.plan.again else None, step.loss)
        else:
            self.plans.over(met(), written(), None if step.taken else step.loss)

    def _went_on(self, number: int) -> None:
        """Note why the step left its plan: it ran more operators than the plan."""
        self.why = f"the step went on after the {number} operators of the record"

    def _was_another(self, number: int, name: str) -> None:
        """Note why the step left its plan: operator `number` was `name`, not the recorded one."""
        self.why = f"operator {number} of the step was {name}, not as recorded"
