"""Run a step within several budgets while weights, gradients and state move to the host.

A trace does not describe such moves, so nothing is simulated: `rekindle.profile` measures these
budgets. The smallest one is found from below. A step that does not fit raises `OutOfBudget`, which
names the bytes that the failed operator needs at least; they are the next budget to try.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, final

import torch

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes
from rekindle.policies import Policy, Swap
from rekindle.pytorch.context import Run, budget
from rekindle.pytorch.online import too_small
from rekindle.pytorch.rehearsed import LEAST_MOVED, ON_LISTS
from rekindle.report._data import Choice
from rekindle.trace import Trace

POINTS: Final = 5
"""The number of budgets to measure."""
_SPARE: Final = 1.02


@final
@dataclass(frozen=True, slots=True)
class MovingSteps:
    """Runs a step within budgets for `evict="anything"` and `swap=`.

    No dispatch mode may be on, because autograd then writes no result over a gradient.

    Attributes:
        step: The step.
        time: Runs the step in a run, and returns its time (ns).
        policy: The policy of the budgets.
        device: The device of the budgets.
        swap: The argument `swap=` of the budgets.
        directory: The argument `swap_directory=` of the budgets.
        plain_ns: The time (ns) of the step without Rekindle.
        repeats: How often to time the step within each budget.
        watch: Called with a text on the progress.
    """

    step: Callable[[], object]
    time: Callable[[Run], Nanoseconds]
    policy: Policy | None
    device: str | torch.device | None
    swap: str | int | Swap
    directory: str | os.PathLike[str] | None
    plain_ns: Nanoseconds
    repeats: int
    watch: Callable[[str], None]

    def within(self, amount: Bytes) -> Choice:
        """Run a step within `amount` bytes to warm up, then time it.

        Raises:
            OutOfBudget: The step does not fit.
        """
        context = budget(
            amount,
            policy=self.policy,
            device=self.device,
            evict="anything",
            swap=self.swap,
            swap_directory=self.directory,
        )
        with too_small.ignored(), context as run:
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
        slowdown = ns / self.plain_ns
        return Choice(amount, ns, slowdown, recompute_ns, recomputations, host, copied)

    def choices(self, trace: Trace, most: Bytes) -> tuple[Choice, ...]:
        """Find the smallest budget, and measure budgets between it and `most`.

        Args:
            trace: The trace of the step without moves.
            most: A budget in which nothing has to move.

        Returns:
            The budgets, the largest first. None is faster than a larger one.
        """
        smallest = self._smallest(trace, most)
        found: list[Choice] = []
        slowest: Nanoseconds = 0
        for number in range(POINTS):
            self.watch(f"moving state, budget {number + 1} of {POINTS}")
            # Small budgets change the time most, so they are closer to each other.
            share = 1 - number / (POINTS - 1)
            amount = int(smallest.budget * max(1, most / smallest.budget) ** share)
            choice = self.within(amount) if share else smallest
            slowest = max(slowest, choice.step_ns)
            found.append(replace(choice, step_ns=slowest, slowdown=slowest / self.plain_ns))
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
