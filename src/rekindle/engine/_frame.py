"""The state of a call while the engine brings its inputs back, and the errors that can end it."""

from __future__ import annotations

from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._graph import Call, Storage, Value


@final
class NoRoom(Exception):
    """`needed` bytes do not fit into the budget, although all candidates have been evicted.

    Drivers turn this error into `OutOfBudget`, which names the memory that is in use.
    """

    def __init__(self, needed: Bytes, memory: Bytes, budget: Bytes, call: Call | None) -> None:
        super().__init__(f"{needed} bytes needed, {memory} of {budget} in use, none can be evicted")
        self.needed = needed
        self.memory = memory
        self.budget = budget
        self.call = call


@final
class Thrashed(Exception):
    """All recomputation of a run took longer than `Rules.recompute_limit` in total."""

    def __init__(self, recompute_ns: Nanoseconds, limit: Nanoseconds) -> None:
        super().__init__(f"recomputation took {recompute_ns} ns of at most {limit}")


@final
class Cyclic(Exception):
    """A value is, directly or indirectly, an input of its own call: the graph is damaged."""

    def __init__(self) -> None:
        super().__init__(
            "a value is needed to compute itself: the graph is damaged; please report this"
        )


@final
class Frame:
    """A call in progress: its inputs that are still missing, and its inputs that are locked."""

    __slots__ = ("call", "gave_up", "locked", "pending", "wanted")

    def __init__(self, call: Call, wanted: Value | None) -> None:
        self.call = call
        #: output to recompute; None: the call runs for the first time, for all of its outputs
        self.wanted = wanted
        self.pending: list[Value] = []
        self.locked: list[Storage] = []
        #: the inputs that this call had locked were swapped out, to make room for a call that it
        #: waits for
        self.gave_up = False

    def may_consume(self) -> bool:
        """Return True if nothing but this call needs the inputs that it overwrites."""
        for output, source in self.call.overwrites:
            storage = source.storage
            mine = self.locked.count(storage)
            kept = storage.held or storage.pinned or not storage.dead or not storage.replayable
            if kept or storage.locks > mine or output.storage.resident:
                return False
        return True
