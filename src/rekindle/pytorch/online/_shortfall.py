"""A device that has less memory than the budget says: how much less, as far as it has shown.

What others took meanwhile, what operators take inside themselves, what lies in pieces: no budget
counts that. An allocation that failed would fail again at the next operator, so from then on the
budget is what fitted. Memory in pieces is no number, though: where the program cannot do with that,
the budget is what it was given again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from rekindle._types import Bytes
from rekindle.engine import Engine


@final
class Shortfall:
    """Of the device beneath the budget of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.times = 0  #: how often the device had less than the budget says
        self.by_sum = 0  #: how often no place among neighbors helped
        self.lowered: Bytes | float = 0  #: what the budget is less now than the program was told
        self._engine = engine
        self._insists = False

    @property
    def budget(self) -> Bytes | float:
        """What it is now."""
        return self._engine.budget

    def step(self, needed: Bytes) -> Bytes:
        """What to evict at first for an operator that needs so much and did not get it: each time
        twice as much as the last time, up to half."""
        self.by_sum += 1
        return min(max(needed, 1) << min(self.by_sum, 30), self._engine.memory // 2)

    def fitted(self, nbytes: Bytes) -> None:
        """So much did, and that is the budget from now on, as long as the program does with it."""
        self.times += 1
        engine = self._engine
        if nbytes < engine.budget and not self._insists:
            self.lowered += engine.budget - nbytes
            engine.budget = nbytes

    def as_given(self) -> bool:
        """The program cannot: the budget is what it was given. Returns whether it was less."""
        less, self.lowered = self.lowered, 0
        self._engine.budget += less
        return less > 0

    def forget(self) -> None:
        """The program was given another budget."""
        self.lowered = 0

    @contextmanager
    def insisting(self) -> Iterator[None]:
        """Inside, what was begun anew comes to its end: the budget gets no less, or that might be
        begun anew for ever."""
        before, self._insists = self._insists, True
        try:
            yield
        finally:
            self._insists = before
