"""Who held the memory when there was most of it."""

from __future__ import annotations

import math
from typing import final

from rekindle._types import Bytes
from rekindle.engine import Engine
from rekindle.pytorch.online._explain import Snapshot, snapshot
from rekindle.pytorch.online._owners import Owners
from rekindle.pytorch.tensors import Table


@final
class Peak:
    """The latest look at who holds memory, taken whenever there is clearly more of it than ever."""

    def __init__(self, engine: Engine, table: Table, owners: Owners) -> None:
        self.now = Snapshot()
        self.above: float = 0  #: memory at which `now` is out of date
        self.exact_from: float = math.inf  #: from here on every new peak is looked at
        self._engine = engine
        self._table = table
        self._owners = owners

    def look(self) -> Snapshot:
        """Looks again: every look walks all storages, so one is worth 2 % more memory."""
        self.now = now = snapshot(self._engine, self._table, self._owners)
        self.above = self._next_look(now.memory)
        return now

    def expect(self, nbytes: Bytes) -> None:
        """Take a snapshot now, and one of each new peak of `nbytes` or more."""
        self.exact_from = nbytes
        self.look()

    def _next_look(self, memory: Bytes) -> float:
        if memory >= self.exact_from:
            return memory
        return min(1.02 * memory, self.exact_from - 1)
