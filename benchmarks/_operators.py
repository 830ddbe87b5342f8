"""How many operators a step of a model has."""

from __future__ import annotations

from typing import Any

from _common import ROOT as _ROOT  # the tests come into reach with it
from tests.pytorch.models import Case
from torch.utils._python_dispatch import TorchDispatchMode

assert _ROOT


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def operators(case: Case, batch: int) -> int:
    """In one step on this batch, forward, backward and optimizer, whose state is there already."""
    workload = case.build()
    workload.step(0)
    with Count() as count:
        workload.step(batch)
    return count.operators
