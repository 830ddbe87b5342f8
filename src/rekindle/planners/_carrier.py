"""Start the copies to and from the host of a plan as early as possible.

A sequence (`_sequence.py`) says which items (storages) are swapped in, and by which step at the
latest. The items that are evicted first are copied to the host first. The items that are read first
are copied back first (earliest deadline first; Jackson 1955). A copy starts early only if memory
has room and no other copy runs in its direction, by the clock of `rekindle.schedule.Timeline`.
`_writer.py` calls the class `Carrier`.
"""

from __future__ import annotations

import heapq
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds, StorageId
from rekindle.planners._sequence import Timeline as Line
from rekindle.policies.swap import Swap
from rekindle.schedule import Action, Compute, Free, SwapIn, SwapOut, Timeline

_AHEAD: Final = 16  # how many of the next swap-ins to examine for one that can start now


@final
class Carrier:
    """Decide which copies to and from the host begin between two steps of a sequence.

    The caller reports every action with `follow`, so that the clock and the memory are right.
    """

    def __init__(self, line: Line, budget: Bytes | None, swap: Swap) -> None:
        self.timeline = Timeline(line.problem.trace, budget, swap)
        self._line = line
        self._budget: Bytes | float = float("inf") if budget is None else budget
        self._memory = 0  # bytes in use now
        # bytes in use at each step, including swap-ins that start early
        self._planned = line.memory.copy()
        self._resident: set[StorageId] = set()
        # item to copy to the host -> step of its first eviction
        self._unsent: dict[int, int] = {}
        # heap of (step of the eviction, item) for items that exist but are not copied yet
        self._departures: list[tuple[int, int]] = []
        # swap-ins: (latest step, item, earliest step)
        self._arrivals: list[tuple[int, int, int]] = []
        self._ahead: set[int] = set()  # items whose swap-in started before the step that needs it
        # item -> number of its swap-ins that have not happened yet
        self._visits: dict[int, int] = {}
        self._read_arrivals()

    def _read_arrivals(self) -> None:
        """Collect the swap-ins of the sequence, and the storages to copy to the host for them."""
        line = self._line
        gone: dict[int, int] = {}  # item -> the step at which it was last evicted or freed
        for copy in sorted(line.copies, key=lambda copy: copy.start):
            step = line.steps[copy.start]
            if step < 0:
                self._arrivals.append((copy.start, copy.item, gone[copy.item] + 1))
                self._visits[copy.item] = self._visits.get(copy.item, 0) + 1
            gone[copy.item] = copy.end
        for copy in line.copies:
            if copy.item in self._visits:
                self._unsent.setdefault(copy.item, copy.end)
                self._unsent[copy.item] = min(copy.end, self._unsent[copy.item])
        self._arrivals.reverse()  # reversed, so that pop() removes the next swap-in

    def follow(self, action: Action) -> None:
        """Update the clock and the memory in use after `action`."""
        trace = self._line.problem.trace
        before = self._memory
        match action:
            case Compute(op_id, in_place):
                op = trace.ops[op_id]
                for storage in trace.new_storages(op):
                    self._appear(storage)
                if in_place:
                    for _, source in op.overwrites:
                        self._vanish(trace.values[source])
            case SwapIn(storage):
                self._appear(storage)
            case Free(storage) | SwapOut(storage, keep=False):
                self._vanish(storage)
                before = self._memory
            case _:
                pass
        self.timeline.follow(action, before)

    def made(self, items: tuple[int, ...]) -> None:
        """Record that `items` were computed for the first time, so they can be copied."""
        for item in items:
            if item in self._unsent:
                heapq.heappush(self._departures, (self._unsent[item], item))

    def must_send(self, item: int) -> bool:
        """Return True if `item`, which is being evicted, must be copied to the host first."""
        return self._unsent.pop(item, None) is not None

    def spent(self, item: int) -> bool:
        """Return True if no later swap-in needs the copy of the evicted `item` on the host."""
        if self._visits.get(item) != 0:
            return False
        del self._visits[item]
        return True

    def came_ahead(self, item: int) -> bool:
        """Return True if the swap-in of `item`, which is due now, has already started."""
        self._visits[item] -= 1
        if item not in self._ahead:
            return False
        self._ahead.remove(item)
        return True

    def departure(self, step: int) -> int | None:
        """Return a storage whose copy to the host should start before `step`, or None."""
        if self.timeline.sent_until > self._soon(step):
            return None
        while self._departures:
            _, item = heapq.heappop(self._departures)
            if self._unsent.pop(item, None) is not None:
                return item
        return None

    def arrival(self, step: int) -> int | None:
        """Return a storage whose swap-in should start before `step`, earlier than due, or None."""
        while self._arrivals and self._arrivals[-1][0] <= step:
            self._arrivals.pop()
        if self.timeline.back_until > self._soon(step):
            return None
        following = self._arrivals[: -_AHEAD - 1 : -1]
        for back, (until, item, since) in enumerate(following, start=1):
            if since <= step:
                nbytes = self._line.problem.nbytes[item]
                room = self._budget - int(self._planned[step:until].max())
                if nbytes > min(room, self.timeline.room(self._memory)):
                    return None
                self._planned[step:until] += nbytes
                self._ahead.add(item)
                del self._arrivals[-back]
                return item
        return None

    def _soon(self, step: int) -> Nanoseconds:
        """Return the time (ns) at which `step` ends.

        A transfer direction that is busy until a later time gets no new copy.
        """
        node = self._line.steps[step]
        return self.timeline.now + (self._line.problem.cost[node] if node >= 0 else 0)

    def _appear(self, storage: StorageId) -> None:
        if storage not in self._resident:
            self._resident.add(storage)
            self._memory += self._line.problem.trace.storages[storage]

    def _vanish(self, storage: StorageId) -> None:
        if storage in self._resident:
            self._resident.remove(storage)
            self._memory -= self._line.problem.trace.storages[storage]
