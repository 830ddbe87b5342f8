"""Compute when each action of a schedule happens if storages are swapped to the host and back.

There is one clock for operators and one for each transfer direction. Copies overlap with operators;
in each direction one copy runs after the other. An operator waits for the swap-in of its inputs. It
also waits for the swap-out of storages that were evicted to make room for its results, because
their memory is free only when the copy has ended. All other code gets these times from this module:
the simulator uses a `Timeline` while it decides, the planners and the verifier afterwards.
"""

from __future__ import annotations

import heapq
from typing import final

from rekindle._types import Bytes, Nanoseconds, StorageId
from rekindle.policies.swap import HostLink, Swap
from rekindle.schedule._actions import Action, Compute, Discard, Free, SwapIn, SwapOut
from rekindle.trace import Op, Trace


@final
class Timeline:
    """Clock that follows the actions of one trace within `budget`. Times are ns since the start.

    Attributes:
        now: The time at which the next action can begin.
        waiting_ns: Time that the program waited for copies.
        transfer_ns: Total time of all copies.
        leaving_bytes: Bytes of evicted storages whose copies to the host are not finished.
        sent_until: The time until which the direction to the host is busy.
        back_until: The time until which the direction from the host is busy.
    """

    def __init__(self, trace: Trace, budget: Bytes | None, swap: Swap) -> None:
        self.now: Nanoseconds = 0
        self.waiting_ns: Nanoseconds = 0
        self.transfer_ns: Nanoseconds = 0
        self.leaving_bytes: Bytes = 0
        self._trace = trace
        self._budget: Bytes | float = float("inf") if budget is None else budget
        self._link = HostLink(swap)
        # heap of (time at which the memory becomes free, bytes) for evicted storages whose copies
        # run
        self._leaving: list[tuple[Nanoseconds, Bytes]] = []
        # storage -> time at which its copy to the host ends
        self._sent: dict[StorageId, Nanoseconds] = {}
        # storage -> time at which its copy from the host ends
        self._back: dict[StorageId, Nanoseconds] = {}
        self.sent_until: Nanoseconds = 0
        self.back_until: Nanoseconds = 0

    def follow(self, action: Action, memory: Bytes) -> None:
        """Advance the clock by one action.

        Args:
            action: The next action.
            memory: Bytes in use, without those that the action makes, swaps in or frees.
        """
        match action:
            case Compute(op, in_place):
                self._compute(self._trace.ops[op], memory, in_place)
            # The memory is free only when the copies that read or write it have ended.
            case Free(storage):
                end = max(self._sent.get(storage, 0), self._back.pop(storage, 0))
                self._leave(storage, end)
            case SwapOut(storage, keep):
                self._swap_out(storage, keep)
            case SwapIn(storage):
                self._swap_in(storage, memory)
            case Discard():
                pass

    def need(self, storage: StorageId) -> None:
        """Wait until `storage`, which is resident or being swapped in, can be read."""
        self._wait(self._back.get(storage, 0))

    def room(self, memory: Bytes) -> Bytes | float:
        """Return how many bytes of the budget are free now, if `memory` bytes are in use.

        Evicted storages whose copy to the host still runs are not free.
        """
        self._pass()
        return self._budget - memory - self.leaving_bytes

    def _compute(self, op: Op, memory: Bytes, in_place: bool) -> None:
        """Wait until the inputs of an operator are resident and its results fit, then run it."""
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
        """Start the copy of a storage to the host when the direction to the host is idle."""
        nbytes = self._trace.storages[storage]
        begin = max(self.now, self._back.get(storage, 0))
        self._sent[storage] = self.sent_until = self._link.send(nbytes, begin)
        self.transfer_ns += self._link.out_ns(nbytes)
        if not keep:
            self._leave(storage, self._sent[storage])

    def _swap_in(self, storage: StorageId, memory: Bytes) -> None:
        """Start the copy of a storage from the host when it fits and the direction is idle."""
        nbytes = self._trace.storages[storage]
        self._wait_for_room(memory + nbytes)
        length = self._link.in_ns(nbytes)
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
