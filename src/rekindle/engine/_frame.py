"""The state of a call while the engine brings its inputs back, and the errors that can end it."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import final

from rekindle._types import Bytes, Nanoseconds, OpId
from rekindle.engine._graph import Call, Storage, Value


@final
class NoRoom(Exception):
    """`needed` bytes do not fit into the budget, although everything evictable was evicted.

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

    __slots__ = ("call", "locked", "pending", "wanted")

    def __init__(self, call: Call, wanted: Value | None) -> None:
        self.call = call
        #: output to recompute; None: the call runs for the first time, for all of its outputs
        self.wanted = wanted
        self.pending: list[Value] = []
        self.locked: list[Storage] = []

    def may_consume(self) -> bool:
        """Return True if nothing but this call needs the inputs that it overwrites."""
        for output, source in self.call.overwrites:
            storage = source.storage
            mine = self.locked.count(storage)
            kept = storage.held or storage.pinned or not storage.dead or not storage.replayable
            if kept or storage.locks > mine or output.storage.resident:
                return False
        return True


@final
class Waiting:
    """Calls that wait for their inputs to be recomputed, in the order in which they first ran."""

    def __init__(self) -> None:
        self.frames: dict[Call, Frame] = {}
        #: for each missing value: the frames of the calls that read it
        self.readers: dict[Value, list[Frame]] = {}
        self._heap: list[tuple[OpId, Call]] = []

    def push(self, frame: Frame) -> None:
        """Add the frame of a call."""
        self.frames[frame.call] = frame
        heappush(self._heap, (frame.call.id, frame.call))

    def first(self) -> Frame | None:
        """Return the frame of the call that ran first, or None if no call waits."""
        return self.frames[self._heap[0][1]] if self._heap else None

    def pop(self) -> None:
        """Remove the first frame."""
        del self.frames[heappop(self._heap)[1]]

    def in_order(self) -> list[Call]:
        """Return the waiting calls in the order in which they first ran."""
        return [call for _, call in sorted(self._heap)]
