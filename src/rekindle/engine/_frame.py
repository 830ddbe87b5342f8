"""A call in progress, and how a call in progress can end: all but the deciding."""

from __future__ import annotations

from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._graph import Call, Storage, Value


@final
class NoRoom(Exception):
    """Everything that may be let go has been, and `needed` bytes do not fit."""

    def __init__(self, needed: Bytes, memory: Bytes, budget: Bytes, call: Call | None) -> None:
        super().__init__(f"{needed} bytes needed, {memory} of {budget} in use, none can be evicted")
        self.needed = needed
        self.memory = memory
        self.budget = budget
        self.call = call


@final
class Thrashed(Exception):
    """Recomputation took longer than `Rules.recompute_limit`."""

    def __init__(self, recompute_ns: Nanoseconds, limit: Nanoseconds) -> None:
        super().__init__(f"recomputation took {recompute_ns} ns of at most {limit}")


@final
class Cyclic(Exception):
    """A value is an input of the calls that make it, directly or not: the graph is damaged."""

    def __init__(self) -> None:
        super().__init__(
            "a value would have to be there before it can be computed; please report this"
        )


@final
class Frame:
    """A call in progress: its inputs still to be had (last first), and those locked for it."""

    __slots__ = ("call", "gave_up", "locked", "pending", "wanted")

    def __init__(self, call: Call, wanted: Value | None) -> None:
        self.call = call
        self.wanted = wanted  #: None: all outputs, for the first time
        self.pending: list[Value] = []
        self.locked: list[Storage] = []
        self.gave_up = False  #: what it had locked, to make room for an input, in vain or not

    def may_consume(self) -> bool:
        """Whether nobody but this call can ask for the inputs that it overwrites."""
        for output, source in self.call.overwrites:
            storage = source.storage
            mine = self.locked.count(storage)
            kept = storage.held or storage.pinned or not storage.dead or not storage.replayable
            if kept or storage.locks > mine or output.storage.resident:
                return False
        return True
