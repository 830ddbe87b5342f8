"""When what happens: one clock for computation, one for each way between device and host.

Copies run beside computation, one after the other on each way. An operator waits for copies of
what it reads, and of what went to make room for its results: memory is free only when the copy of
what was in it has ended. The only account of this: whoever wants to know how long a schedule with
copies takes asks a `Timeline`, the simulator while it decides and the verifier afterwards.
"""

from __future__ import annotations

import heapq
from typing import final

from rekindle._types import Bytes, Nanoseconds, StorageId
from rekindle.policies.swap import Swap, Ways
from rekindle.schedule._actions import Action, Compute, Discard, Free, SwapIn, SwapOut
from rekindle.trace import Op, Trace


@final
class Timeline:
    """Follows actions for one trace within `budget`; all times in ns since the program began."""

    def __init__(self, trace: Trace, budget: Bytes | None, swap: Swap) -> None:
        self.now: Nanoseconds = 0
        self.waiting_ns: Nanoseconds = 0
        self.transfer_ns: Nanoseconds = 0
        self.leaving_bytes: Bytes = 0  #: let go, but not free yet
        self._trace = trace
        self._budget: Bytes | float = float("inf") if budget is None else budget
        self._ways = Ways(swap)
        self._leaving: list[tuple[Nanoseconds, Bytes]] = []  # a heap: when it is free
        self._sent: dict[StorageId, Nanoseconds] = {}  # when the copy on the host is whole
        self._back: dict[StorageId, Nanoseconds] = {}  # when the one on the device is again
        self.sent_until: Nanoseconds = 0  #: the way to the host is busy until then
        self.back_until: Nanoseconds = 0  #: and the way back

    def follow(self, action: Action, memory: Bytes) -> None:
        """`action` is next; `memory` bytes are in use without what it makes or brings."""
        match action:
            case Compute(op, in_place):
                self._compute(self._trace.ops[op], memory, in_place)
            case Free(storage):  # free once no copy reads or writes it
                end = max(self._sent.get(storage, 0), self._back.pop(storage, 0))
                self._leave(storage, end)
            case SwapOut(storage, keep):
                self._swap_out(storage, keep)
            case SwapIn(storage):
                self._swap_in(storage, memory)
            case Discard():
                pass

    def need(self, storage: StorageId) -> None:
        """The program reads `storage`, which is resident or on its way back."""
        self._wait(self._back.get(storage, 0))

    def room(self, memory: Bytes) -> Bytes | float:
        """What can be taken without waiting, beside `memory` bytes in use."""
        self._pass()
        return self._budget - memory - self.leaving_bytes

    def _compute(self, op: Op, memory: Bytes, in_place: bool) -> None:
        trace = self._trace
        for value in op.inputs:
            self.need(trace.values[value])
        fresh = trace.output_bytes(op)
        if in_place:
            for _, source in op.overwrites:
                fresh -= trace.storages[trace.values[source]]
                self._wait(self._sent.get(trace.values[source], 0))
        self._wait_for_room(memory + fresh)
        self.now += op.cost

    def _swap_out(self, storage: StorageId, keep: bool) -> None:
        """A copy to the host begins as soon as it can."""
        nbytes = self._trace.storages[storage]
        begin = max(self.now, self._back.get(storage, 0))
        self._sent[storage] = self.sent_until = self._ways.send(nbytes, begin)
        self.transfer_ns += self._ways.out_ns(nbytes)
        if not keep:
            self._leave(storage, self._sent[storage])

    def _swap_in(self, storage: StorageId, memory: Bytes) -> None:
        """A copy back begins as soon as it can."""
        nbytes = self._trace.storages[storage]
        self._wait_for_room(memory + nbytes)
        length = self._ways.in_ns(nbytes)
        self.back_until = max(self.now, self.back_until, self._sent[storage]) + length
        self._back[storage] = self.back_until
        self.transfer_ns += length

    def _leave(self, storage: StorageId, end: Nanoseconds) -> None:
        if end > self.now:
            nbytes = self._trace.storages[storage]
            heapq.heappush(self._leaving, (end, nbytes))
            self.leaving_bytes += nbytes

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
