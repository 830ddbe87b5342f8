"""When what happens: one clock for computation, one for each way between device and host.

Copies run beside computation, one after the other on each way. An operator waits for copies of
what it reads, and of what went to make room for its results: memory is free only when the copy of
what was in it has ended.
"""

from __future__ import annotations

import heapq
from typing import final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine import Call, Storage
from rekindle.policies import Swap, Ways


@final
class Timeline:
    """Follows the actions of an engine; all times in ns since the program began."""

    def __init__(self, budget: Bytes | None, swap: Swap) -> None:
        self.now: Nanoseconds = 0
        self.waiting_ns: Nanoseconds = 0
        self.transfer_ns: Nanoseconds = 0
        self.leaving_bytes: Bytes = 0  #: let go, but not free yet
        self._budget: Bytes | float = float("inf") if budget is None else budget
        self._ways = Ways(swap)
        self._busy_in: Nanoseconds = 0
        self._leaving: list[tuple[Nanoseconds, Bytes]] = []  # a heap: when it is free
        self._sent: dict[Storage, Nanoseconds] = {}  # when the copy on the host is whole
        self._back: dict[Storage, Nanoseconds] = {}  # and when the one on the device is again

    def compute(self, call: Call, memory: Bytes, *, in_place: bool) -> None:
        """`call` runs; `memory` bytes are in use without its results."""
        for value in call.inputs:
            self.need(value.storage)
        fresh = call.nbytes
        if in_place:
            for _, source in call.overwrites:
                fresh -= source.storage.nbytes
                self._wait(self._sent.get(source.storage, 0))
        self._wait_for_room(memory + fresh)
        self.now += call.cost

    def need(self, storage: Storage) -> None:
        """The program reads `storage`, which is resident or on its way back."""
        self._wait(self._back.get(storage, 0))

    def free(self, storage: Storage) -> None:
        """Its memory is free once no copy reads or writes it."""
        self._leave(storage, max(self._sent.get(storage, 0), self._back.pop(storage, 0)))

    def swap_out(self, storage: Storage, *, keep: bool) -> None:
        """A copy to the host begins as soon as it can."""
        begin = max(self.now, self._back.get(storage, 0))
        self._sent[storage] = self._ways.send(storage.nbytes, begin)
        self.transfer_ns += self._ways.out_ns(storage.nbytes)
        if not keep:
            self._leave(storage, self._sent[storage])

    def swap_in(self, storage: Storage, memory: Bytes) -> None:
        """A copy back begins as soon as it can; `memory` bytes are in use without it."""
        self._wait_for_room(memory + storage.nbytes)
        length = self._ways.in_ns(storage.nbytes)
        self._busy_in = max(self.now, self._busy_in, self._sent[storage]) + length
        self._back[storage] = self._busy_in
        self.transfer_ns += length

    def room(self, memory: Bytes) -> Bytes | float:
        """What can be taken without waiting, beside `memory` bytes in use."""
        self._pass()
        return self._budget - memory - self.leaving_bytes

    def _leave(self, storage: Storage, end: Nanoseconds) -> None:
        if end > self.now:
            heapq.heappush(self._leaving, (end, storage.nbytes))
            self.leaving_bytes += storage.nbytes

    def _wait_for_room(self, memory: Bytes) -> None:
        self._pass()
        while self._leaving and memory + self.leaving_bytes > self._budget:
            self._wait(self._leaving[0][0])
            self._pass()

    def _pass(self) -> None:
        while self._leaving and self._leaving[0][0] <= self.now:
            self.leaving_bytes -= heapq.heappop(self._leaving)[1]

    def _wait(self, until: Nanoseconds) -> None:
        if until > self.now:
            self.waiting_ns += until - self.now
            self.now = until
