"""`Probe`: test if steps fit within a budget, and restore the state of the program afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, final

import torch

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle.policies import Policy, Swap
from rekindle.pytorch.context import Amount, Run, budget
from rekindle.pytorch.devices import is_out_of_memory
from rekindle.pytorch.observed._before import Undo
from rekindle.pytorch.observed._bookkeeping import prices
from rekindle.pytorch.observed._profiler import trace_of
from rekindle.pytorch.online import device_of, too_small
from rekindle.trace import Trace


class Tried(NamedTuple):
    """The result of testing a step within a budget.

    Attributes:
        shortage: The error if the step ran out of the budget or of device memory, else None.
        slowdown: Time of the step with recomputation, divided by the time without.
    """

    shortage: Exception | None
    slowdown: float = 1.0


@final
class Probe:
    """Tests steps within one budget. Each test starts from the same state of the program."""

    def __init__(
        self,
        amount: str | Bytes,
        policy: Policy,
        device: str | torch.device | None,
        swap: str | int | Swap | None = None,
        swap_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """Begin to test steps.

        Args:
            amount: The budget.
            policy: The policy of the budget.
            device: The device whose memory is limited.
            swap: The argument `swap=` of the budget, for `evict="anything"`. None: state stays in
                memory.
            swap_directory: The argument `swap_directory=` of the budget.
        """
        self.device = device_of(device)
        self.budget = Amount(amount).on(self.device)
        self._context = budget(
            self.budget,
            policy=policy,
            device=self.device,
            evict="auto" if swap is None else "anything",
            swap=swap,
            swap_directory=swap_directory,
        )
        self._undo = Undo()

    def tried(self, step: Callable[[], object]) -> Tried:
        """Run `step` twice within the budget, as the first run creates the optimizer's state."""
        try:
            with too_small.ignored(), self._context.copy() as run, self._undo:
                step()
                before = _figures(run)
                step()
                after = _figures(run)
        except OutOfBudget as error:
            return Tried(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return Tried(error)
        finally:
            self._undo.restore()
        computed, lost, again = (new - old for new, old in zip(after, before, strict=True))
        return Tried(None, 1 + (lost + again * prices().again) / max(1, computed))

    def trace(self, step: Callable[[], object]) -> Trace:
        """Return the trace of `step`, recorded without a memory limit."""
        return trace_of(step, self.device, self._undo)


def _figures(run: Run) -> tuple[Nanoseconds, Nanoseconds, int]:
    """Return the time of operators, and the time lost and operators recomputed, so far.

    Waiting for copies to the host and back is lost time.
    """
    swapped = run.report().swapped
    waiting = 0 if swapped is None else swapped.waiting_ns
    return run.compute_ns, run.recompute_ns + waiting, run.recomputations
