"""`Run`: the object that `with rekindle.budget(...) as run` gives the user to read figures."""

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
from rekindle.pytorch.context._report import report_of, swapped_by
from rekindle.pytorch.learned import Learner
from rekindle.pytorch.native import Core, Driver, Recording, Step
from rekindle.report._data import Swapped
from rekindle.report._report import Report
from rekindle.schedule import Record
from rekindle.trace import Trace


@final
class Run:
    """The figures of a run within `rekindle.budget(...)`; readable after the context too.

    Attributes:
        policy: The policy that decides what to evict.
    """

    def __init__(self, driver: Driver, policy: Policy, *, record: bool) -> None:
        self._most = driver.engine.budget  # the largest budget that this run has had
        self.policy = policy
        self._driver = driver
        if record:
            driver.begin_recording()
        self._learner: Learner | None = None
        self._part: Recording | None = None

    @property
    def budget(self) -> Bytes | None:
        """The budget in bytes, or None without a limit.

        Set it to change the budget during a run, preferably between two steps. Text ("6GiB") works
        too. Setting a smaller budget evicts at once, or raises `OutOfBudget` and keeps the old
        budget.
        """
        return self._driver.engine.budget

    @budget.setter
    def budget(self, amount: str | Bytes) -> None:
        before = self.budget
        if before is None or self._most is None:
            raise Unsupported(
                "run.budget = ...: this run has no budget to change, because it was started with "
                'rekindle.budget.unlimited(); write rekindle.budget("6GiB") there'
            )
        nbytes, driver = parse_bytes(amount, line="run.budget = {}"), self._driver
        with driver.lock:
            driver.engine.budget = nbytes
            try:
                if nbytes < before:
                    driver.make_room(0, "run.budget")
            except OutOfBudget:
                driver.engine.budget = before
                raise
        self._most = max(nbytes, self._most)
        # `driver.watcher` is None after the context has ended. Then no further step needs a plan.
        if self._learner is not None and driver.watcher is not None:
            self._learner.within(nbytes)

    @property
    def peak(self) -> Bytes:
        """The largest number of bytes in use at any moment so far."""
        return self._driver.steps.peak

    @property
    def memory(self) -> Bytes:
        """The bytes that count against the budget now."""
        return self._driver.engine.memory

    @property
    def steps(self) -> int:
        """The number of optimizer steps that ended so far."""
        return self._driver.steps.number

    @property
    def last_step(self) -> Step | None:
        """The figures of the last optimizer step, or None before the first."""
        return self._driver.steps.last

    def release(self) -> Bytes:
        """Move weights, gradients and optimizer state to the host, so that others use the memory.

        For example, an inference server takes the device between two steps. What an operator reads
        meanwhile comes back for it.

        Returns:
            The bytes of tensors that stay in memory. `run.report()` says why.

        Raises:
            Unsupported: Weights and optimizer state may not move in this run.
        """
        return self._with_moved_state("release").release(self._driver.handle)

    def resume(self) -> None:
        """Move what `release` moved to the host back into memory, as far as the budget has room.

        Without this call, each tensor comes back when the program reads it.

        Raises:
            Unsupported: Weights and optimizer state may not move in this run.
        """
        self._with_moved_state("resume").resume(self._driver.handle)

    def _with_moved_state(self, name: str) -> Core:
        """Return the native core if state may move to the host, for the method `name`."""
        driver = self._driver
        if not driver.moves_state:
            raise Unsupported(
                f"run.{name}(): weights and optimizer state do not move to the host in this run; "
                'write rekindle.budget(..., evict="anything", swap="64GiB")'
            )
        return driver.core

    def begin_trace(self) -> None:
        """Start recording a trace; `end_trace` ends it.

        Raises:
            Unsupported: Weights and optimizer state move to the host, which no trace describes.
        """
        driver = self._driver
        if driver.moves_state:
            raise Unsupported(
                'run.begin_trace(): no trace can be recorded with evict="anything" and swap=, '
                'because weights and optimizer state move to the host. Write evict="auto"'
            )
        with driver.lock:
            self._part = driver.also_capture()

    def end_trace(self) -> Trace:
        """Return the trace since `begin_trace`, for the simulator and the planners.

        Raises:
            Unsupported: No trace was begun.
        """
        part, self._part = self._part, None
        if part is None:
            raise Unsupported(
                "run.end_trace(): no trace was begun; write run.begin_trace() before "
                "run.end_trace()"
            )
        driver = self._driver
        with driver.lock:
            driver.capture_no_more()
        return part.trace()

    def on_step(self, listener: Callable[[Step], None]) -> None:
        """Call a function after each optimizer step.

        Args:
            listener: A function of one argument: the `Step`, with the figures of the step that
                just ended.
        """
        checks.function(listener, "run.on_step({})", "lambda step: print(step.overhead)", "step")
        self._driver.steps.listeners.append(listener)

    def status(self) -> str:
        """Return one line: memory, budget, and what the last step cost.

        Example:
            ```python
            bar.set_postfix_str(run.status())
            ```
        """
        limit = "no limit" if self.budget is None else format_bytes(self.budget)
        memory = f"{format_bytes(self.memory)} of {limit}, peak {format_bytes(self.peak)}"
        if self.budget is not None and self.memory > max(self.budget, self.peak):
            # The end of the context restored evicted values without a budget, so show the memory
            # before that.
            memory = (
                f"peak {format_bytes(self.peak)} of {limit}, {format_bytes(self.memory)} after the "
                "end, which restored evicted tensors"
            )
        step = self.last_step
        if step is None:
            lost = self.lost_ns / self.compute_ns if self.compute_ns else 0.0
            return f"{memory}; so far: {_events(self.evictions, lost)}"
        return f"{memory}; step {step.number}: {_events(step.evictions, step.overhead)}"

    def __repr__(self) -> str:
        return f"<rekindle.Run: {self.status()}>"

    @property
    def evictions(self) -> int:
        """How often a value was evicted that the program or autograd might still read."""
        return self._driver.evictions

    @property
    def recomputations(self) -> int:
        """How many operator calls were repeated to recompute evicted values."""
        return self._driver.recomputations

    @property
    def compute_ns(self) -> Nanoseconds:
        """Sum of the measured costs (ns) of the operators that the program called."""
        return self._driver.engine.compute_ns

    @property
    def recompute_ns(self) -> Nanoseconds:
        """Sum of the measured costs (ns) of recomputed operators.

        It includes the time of what operators in slices computed more than once.
        """
        return self._driver.engine.recompute_ns

    @property
    def lost_ns(self) -> Nanoseconds:
        """Time (ns) that the budget cost: recomputing, choosing what to evict, and evicting."""
        return self._driver.lost_ns

    @property
    def record(self) -> Record:
        """The figures of the run as data; with `record=True`, also evictions and computations."""
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
        """The events of the run, for the simulator and the planners.

        Raises:
            Unsupported: The budget was entered without `record=True`.
        """
        driver = self._driver
        if driver.whole is None:
            raise Unsupported(
                "run.trace: the run was not recorded; write rekindle.budget(..., record=True)"
            )
        with driver.lock:
            trace = driver.whole.trace()
        if driver.places is not None:
            # Usually the source line of an operator is recorded when the next operator runs. No
            # operator follows the last one, so record its line here.
            driver.places.note(len(trace.ops))
        return trace

    @property
    def steps_followed(self) -> int:
        """The number of steps that followed a learned plan from beginning to end."""
        return self._learner.followed if self._learner is not None else 0

    @property
    def steps_left(self) -> int:
        """The number of steps that followed a learned plan at first and then deviated from it."""
        return self._learner.left if self._learner is not None else 0

    def wait_for_plan(self, timeout: float | None = None) -> bool:
        """Wait until the background process has finished the plan that it is making.

        Args:
            timeout: The most seconds to wait. Default: no limit.

        Returns:
            True if the plan is finished, so that the next step can follow it. False after a
            timeout.
        """
        return self._learner is None or self._learner.wait(timeout)

    def keep(self, tensor: Tensor) -> Tensor:
        """Pin a tensor: its storage is never evicted.

        Args:
            tensor: The tensor to pin.

        Returns:
            The same tensor.
        """
        checks.kind(tensor, Tensor, "a tensor", "run.keep({})", "tensor")
        driver = self._driver
        with driver.lock:
            driver.core.keep(driver.handle, tensor)
        return tensor

    def report(self) -> Report:
        """Return the report: peak memory and what held it, evictions, time lost.

        With `record=True` the report also shows memory over time, and memory and recomputation
        by module and source line.

        Returns:
            A `Report`. Print it, `show()` it in color, or save it with `to_html()` or `to_json()`.
        """
        driver = self._driver
        if driver.whole is None:
            report = report_of(driver, self.budget)
        else:
            report = report_of(driver, self.budget, self.trace, self.record)
        summary = "" if self._learner is None else self._learner.summary()
        return replace(report, advice=(*report.advice, summary)) if summary else report


def _events(evictions: int, lost: float) -> str:
    return f"{evictions} eviction{'s' * (evictions != 1)}, time lost {lost:.1%}"
