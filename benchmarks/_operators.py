"""Count the operators of a training step."""

from __future__ import annotations

from typing import Any

from _common import ROOT as _ROOT  # this import makes `tests` importable
from tests.pytorch.models import Case
from torch.utils._python_dispatch import TorchDispatchMode

assert _ROOT


class Count(TorchDispatchMode):
    """Dispatch mode that counts the operators that run while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def operators(case: Case, batch: int) -> int:
    """Return the number of operators in a step on this batch, after the optimizer has its state."""
    workload = case.build()
    workload.step(0)
    with Count() as count:
        workload.step(batch)
    return count.operators
