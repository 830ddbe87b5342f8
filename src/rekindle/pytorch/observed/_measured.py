"""Run a step within several budgets, for `rekindle.profile`, where no simulation knows the answer.

A trace describes neither weights, gradients and state that move to the host, nor operators that run
in slices. In both cases the smallest budget is one in which the step has run:

- If state moves, it is found from below. A step that does not fit raises `OutOfBudget`, which names
  the bytes that the failed operator needs at least; they are the next budget to try.
- If operators run in slices, it is found from above, because the error names what the operator
  needs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final, final

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes
from rekindle.pytorch.context import Run, budget
from rekindle.pytorch.online import too_small
from rekindle.pytorch.rehearsed import LEAST_MOVED, ON_LISTS
from rekindle.report._data import Choice
from rekindle.trace import Trace

POINTS: Final = 5
"""The number of budgets to measure if state moves."""
_SPARE: Final = 1.02
_STRIDE: Final = 1.6
"""A budget that suffices, divided by the next smaller one to try in slices."""
_CLOSE: Final = 1.04
"""The smallest budget in slices is at most so many times one that is too small."""


@final
@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Runs a step within budgets.

    No dispatch mode may be on, because autograd then writes no result over a gradient.

    Attributes:
        step: The step.
        time: Runs the step in a run, and returns its time (ns).
        context: Makes a budget of the given bytes.
        plain_ns: The time (ns) of the step without Rekindle.
        repeats: How often to time the step within each budget.
        watch: Called with a text on the progress.
    """

    step: Callable[[], object]
    time: Callable[[Run], Nanoseconds]
    context: Callable[[Bytes], budget]
    plain_ns: Nanoseconds
    repeats: int
    watch: Callable[[str], None]

    def within(self, amount: Bytes) -> Choice:
        """Run a step within `amount` bytes to warm up, then time it.

        Raises:
            OutOfBudget: The step does not fit.
        """
        with too_small.ignored(), self.context(amount) as run:
            self.step()
            before, times = _figures(run), [self.time(run) for _ in range(self.repeats)]
            recompute_ns, recomputations, copied = (
                (after - earlier) // self.repeats
                for after, earlier in zip(_figures(run), before, strict=True)
            )
        swapped = run.report().swapped
        if run.peak > amount:
            # A step of an optimizer that has begun exceeds the budget rather than fail.
            raise OutOfBudget(
                f"a step needs {format_bytes(run.peak)}",
                needed=run.peak - amount,
                budget=amount,
                smallest_budget=run.peak,
            )
        host, ns = 0 if swapped is None else swapped.host_peak, min(times)
        return Choice(
            amount,
            ns,
            ns / self.plain_ns,
            recompute_ns,
            recomputations,
            host,
            copied,
            measured=True,
            sliced=tuple(each.operator for each in run._driver.sliced),
        )

    def in_slices(self, least: Bytes, whole: Choice) -> tuple[Choice, ...]:
        """Find the smallest budget in which operators run in slices, with about ten budgets.

        Args:
            least: No smaller budget suffices.
            whole: The smallest budget without slices.

        Returns:
            The budgets below `whole` that suffice, the largest first. None is faster than a larger
            one, or than `whole`.
        """
        stride = max(_STRIDE, (whole.budget / least) ** 0.25)
        found, too_little = [whole], least
        while found[-1].budget > _CLOSE * too_little:
            least_found = found[-1].budget
            amount = int(max(least_found / stride, sqrt(least_found * too_little)))
            self.watch(f"operators in slices, within {format_bytes(amount)}")
            try:
                choice = self.within(amount)
            except OutOfBudget:
                too_little = amount
            else:
                found.append(self._at_least(found[-1].step_ns, choice))
        return tuple(found[1:])

    def _at_least(self, ns: Nanoseconds, choice: Choice) -> Choice:
        """Return `choice`, with a step that takes at least `ns`."""
        ns = max(ns, choice.step_ns)
        return replace(choice, step_ns=ns, slowdown=ns / self.plain_ns)

    def with_moves(self, trace: Trace, most: Bytes) -> tuple[Choice, ...]:
        """Find the smallest budget in which state moves; measure budgets between it and `most`.

        Args:
            trace: The trace of the step without moves.
            most: A budget in which nothing has to move.

        Returns:
            The budgets, the largest first. None is faster than a larger one.
        """
        smallest = self._smallest(trace, most)
        found: list[Choice] = []
        for number in range(POINTS):
            self.watch(f"moving state, budget {number + 1} of {POINTS}")
            # Small budgets change the time most, so they are closer to each other.
            share = 1 - number / (POINTS - 1)
            amount = int(smallest.budget * max(1, most / smallest.budget) ** share)
            choice = self.within(amount) if share else smallest
            found.append(self._at_least(found[-1].step_ns if found else 0, choice))
        return tuple(found)

    def _smallest(self, trace: Trace, most: Bytes) -> Choice:
        amount = _lower_bound(trace)
        while True:
            self.watch(f"moving state within {format_bytes(amount)}")
            try:
                return self.within(amount)
            except OutOfBudget as error:
                if amount > 2 * most:
                    raise
                # With other times of operators, other values leave, so a little more is needed.
                amount = int(_SPARE * max(error.smallest_budget, amount))


def _lower_bound(trace: Trace) -> Bytes:
    """Return bytes that any budget needs: for small sources, and for one operator.

    The runtime splits operators on lists, so these do not count.
    """
    staying = most = 0
    for op in trace.ops:
        inputs = {trace.values[value] for value in op.inputs}
        need = sum(trace.storages[storage] for storage in inputs) + trace.output_bytes(op)
        if op.name == "source":
            staying += need if need < LEAST_MOVED else 0
        elif not op.name.startswith(ON_LISTS):
            most = max(most, need + op.workspace)
    return max(1, staying + most)


def _figures(run: Run) -> tuple[Nanoseconds, int, Bytes]:
    """Return time and number of recomputed operators, and bytes copied, of the run so far."""
    swapped = run.report().swapped
    copied = 0 if swapped is None else swapped.out + swapped.back
    return run.recompute_ns, run.recomputations, copied
