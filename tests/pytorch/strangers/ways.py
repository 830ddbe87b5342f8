"""The ways in which a test of another project is run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

SHARE: Final = 0.6  # of a test's own peak: what a tight budget gives it


class Way(Enum):
    PLAIN = "plain"
    HOOKED = "hooked"  # no budget, but saved-tensor hooks that do nothing
    WITHIN = "within"  # a budget without a limit
    EVICTED = "evicted"  # everything that may be evicted is, before every operator
    TIGHT = "tight"  # `SHARE` of the peak that WITHIN measured


@dataclass
class Found:
    """The outcome of one test in one way."""

    test: str
    outcome: str  # "passed", "failed", "skipped", "refused" (OutOfBudget), "ended" (the process)
    peak: int = 0
    why: str = ""
