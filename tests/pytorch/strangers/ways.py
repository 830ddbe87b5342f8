"""The ways to run a test of another project: in plain PyTorch, or within different budgets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

SHARE: Final = 0.6  # tight budget as a share of the test's own peak


class Way(Enum):
    PLAIN = "plain"
    HOOKED = "hooked"  # no budget, but saved-tensor hooks that do nothing
    WITHIN = "within"  # a budget without a limit
    EVICTED = "evicted"  # a budget that evicts all that it may before each operator
    TIGHT = "tight"  # a budget of `SHARE` times the peak that `WITHIN` measured


@dataclass
class Found:
    """The outcome of one test in one way."""

    test: str
    outcome: str  # "passed", "failed", "skipped", "refused" (OutOfBudget), "ended" (the process)
    peak: int = 0
    why: str = ""
