"""What one `rekindle.budget(...)` did so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import final

from torch import Tensor

from rekindle import _checks as checks
from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, parse_bytes
from rekindle.policies import Policy
from rekindle.pytorch.context._cores import Chosen
from rekindle.pytorch.context._report import report_of, swapped_by
from rekindle.pytorch.learned import Learning
from rekindle.pytorch.online import Capture, Driver, Step
from rekindle.report._data import Swapped
from rekindle.report._report import Report
from rekindle.schedule import Record
from rekindle.trace import Trace


@final
class Run:
    """What one `rekindle.budget(...)` did so far; stays readable after the context."""

    def __init__(
        self, driver: Driver, budget: Bytes | None, policy: Policy, core: Chosen, *, record: bool
    ) -> None:
        self._budget = self._most = budget
        self.policy = policy
        self.core = core  #: which one runs it, and why
        self._driver = driver
        if record:
            driver.write_down()
        self._learner: Learning | None = None
        self._part: Capture | None = None

    @property
    def budget(self) -> Bytes | None:
        """How much may be in use, in bytes; None: no limit.

        May be set, also as text ("6GiB"), best between two steps: what is too much for a smaller
        one is let go at once, or `OutOfBudget` is raised and the old one stays.
        """
        return self._budget

    @budget.setter
    def budget(self, amount: str | Bytes) -> None:
        if self._budget is None or self._most is None:
            raise Unsupported(
                "run.budget = ... of a run without a limit, which is only measured; write "
                'rekindle.budget("6GiB")'
            )
        nbytes, driver = parse_bytes(amount, line="run.budget = {}"), self._driver
        with driver.lock:
            driver.settle()
            driver.limit(nbytes)
            try:
                if nbytes < self._budget:
                    driver.make_room(0, "run.budget")
            except OutOfBudget:
                driver.limit(self._budget)
                raise
        self._budget, self._most = nbytes, max(nbytes, self._most)
        if self._learner is not None and driver.watcher is not None:  # the run goes on
            self._learner.within(nbytes)

    @property
    def peak(self) -> Bytes:
        """The most bytes in use at any moment, as counted by the runtime."""
        return self._driver.steps.peak

    @property
    def memory(self) -> Bytes:
        """Bytes in use now, as counted by the runtime."""
        with self._driver.lock:
            self._driver.settle()
        return self._driver.engine.memory

    @property
    def steps(self) -> int:
        """How many steps an optimizer has made."""
        return self._driver.steps.number

    @property
    def last_step(self) -> Step | None:
        """What happened from the optimizer's step before the last to the last one."""
        return self._driver.steps.last

    def begin_trace(self) -> None:
        """Writes down what happens from now on, up to `end_trace`: one step, say."""
        driver = self._driver
        with driver.lock:
            driver.settle()
            driver.poll()  # a trace says when the program lets go, not when somebody asks
            self._part = driver.also_capture()

    def end_trace(self) -> Trace:
        """What happened since `begin_trace`, for the simulator and the planners."""
        part, self._part = self._part, None
        if part is None:
            raise Unsupported("run.end_trace(): nothing was begun; write run.begin_trace() before")
        driver = self._driver
        with driver.lock:
            driver.settle()
            driver.poll()
            driver.capture_no_more()
        return part.trace()

    def on_step(self, listener: Callable[[Step], None]) -> None:
        """Calls `listener` after each step of an optimizer, with what happened since the last."""
        checks.function(listener, "run.on_step({})", "lambda step: print(step.overhead)", "step")
        self._driver.steps.listeners.append(listener)

    def status(self) -> str:
        """One line: memory, budget, and what the last step cost. For a progress bar, say:
        `bar.set_postfix_str(run.status())`."""
        limit = "no limit" if self.budget is None else format_bytes(self.budget)
        memory = f"{format_bytes(self.memory)} of {limit}, peak {format_bytes(self.peak)}"
        step = self.last_step
        if step is None:
            lost = self.lost_ns / self.compute_ns if self.compute_ns else 0.0
            return f"{memory}; so far: {_events(self.evictions, lost)}"
        return f"{memory}; step {step.number}: {_events(step.evictions, step.overhead)}"

    def __repr__(self) -> str:
        return f"<rekindle.Run: {self.status()}; core: {self.core}>"

    @property
    def evictions(self) -> int:
        """How often something was let go that somebody could still ask for."""
        return self._driver.evictions

    @property
    def recomputations(self) -> int:
        """How many operators ran again."""
        return self._driver.recomputations

    @property
    def compute_ns(self) -> Nanoseconds:
        """Time in operators that the program asked for, at their measured prices."""
        return self._driver.engine.compute_ns

    @property
    def recompute_ns(self) -> Nanoseconds:
        """Recomputed operators at their measured costs, without what it took to rebuild them."""
        return self._driver.engine.recompute_ns

    @property
    def lost_ns(self) -> Nanoseconds:
        """Time lost: recomputed operators, and what it took to choose, evict and rebuild."""
        return self._driver.lost_ns

    @property
    def record(self) -> Record:
        """The run as data. With `budget(..., record=True)` it holds every action."""
        recorder = self._driver.recorded()
        now = self.compute_ns, self.recompute_ns, self.evictions, self.recomputations
        return Record(
            tuple(recorder.actions),
            tuple(recorder.clock),
            tuple(recorder.memory),
            self._most,
            self.peak,
            *(self._driver.figures or now),
            repr(self.policy),
            *astuple(swapped_by(self._driver) or Swapped()),
        )

    @property
    def trace(self) -> Trace:
        """What the program did, for the simulator; needs `budget(..., record=True)`."""
        driver = self._driver
        if driver.whole is None:
            raise Unsupported(
                "run.trace: nothing was written down; write rekindle.budget(..., record=True)"
            )
        with driver.lock:
            driver.settle()
            driver.poll()
            trace = driver.whole.trace()
        if driver.places is not None:
            driver.places.note(len(trace.ops))  # the last ones, if nothing came after them
        return trace

    @property
    def steps_followed(self) -> int:
        """How many steps went along a learned schedule from beginning to end."""
        return self._learner.followed if self._learner is not None else 0

    @property
    def steps_left(self) -> int:
        """How many steps began along a learned schedule and then did otherwise."""
        return self._learner.left if self._learner is not None else 0

    def wait_for_plan(self, timeout: float | None = None) -> bool:
        """Waits for the schedule that is being made, `timeout` seconds at most.

        Returns whether none is in the making any more. It is followed from the next step on.
        """
        return self._learner is None or self._learner.wait(timeout)

    def keep(self, tensor: Tensor) -> Tensor:
        """Never lets go of the memory of `tensor`; returns it."""
        checks.kind(tensor, Tensor, "a tensor", "run.keep({})", "tensor")
        driver = self._driver
        with driver.lock:
            driver.settle()
            driver.pin(driver.known(tensor))
        return tensor

    def report(self) -> Report:
        """Peak and when, who held memory at the peak, evictions, recomputation, time lost.

        Print it, `.show()` it in color, save its `.to_html()` or `.to_json()`. With `record=True`
        it also has memory over time and, by module and line, who held it and what ran again.
        """
        driver = self._driver
        if driver.whole is None:
            report = report_of(driver, self.budget)
        else:
            report = report_of(driver, self.budget, self.trace, self.record)
        report = replace(report, core=str(self.core))
        told = "" if self._learner is None else self._learner.told()
        return replace(report, advice=(*report.advice, told)) if told else report


def _events(evictions: int, lost: float) -> str:
    return f"{evictions} eviction{'s' * (evictions != 1)}, time lost {lost:.1%}"
