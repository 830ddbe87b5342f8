"""Tries whether steps fit into a budget; what they learn is undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.policies import Policy
from rekindle.pytorch.context import amount_of, budget
from rekindle.pytorch.observed._profiler import trace_of
from rekindle.pytorch.observed._undo import Undo
from rekindle.pytorch.online import device_of, is_out_of_memory
from rekindle.trace import Trace


@final
class Probe:
    """One budget in bytes, for steps that each start from the same state of the program."""

    def __init__(
        self, amount: str | Bytes, policy: Policy, device: str | torch.device | None
    ) -> None:
        self.device = device_of(device)
        self.budget = amount_of(amount, self.device)
        self._policy = policy
        self._undo = Undo()

    def shortage(self, step: Callable[[], object]) -> Exception | None:
        """Runs `step` twice, for the second one meets the optimizer's state; the error if it does
        not fit into the budget, or not into the device."""
        try:
            with budget(self.budget, policy=self._policy, device=self.device), self._undo:
                step()
                step()
        except OutOfBudget as error:
            return error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return error
        finally:
            self._undo.restore()
        return None

    def trace(self, step: Callable[[], object]) -> Trace:
        """What `step` does, without a limit."""
        return trace_of(step, self.device, self._undo)
