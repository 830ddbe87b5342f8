"""When the copies of a sequence begin: as soon as the ways are idle, and memory has room.

The sequence says what comes back from the host, and at the latest when. Here the way there takes
first what is let go first, and the way back brings first what is read first (earliest deadline
first; Jackson 1955), each while it would be idle otherwise, by the clock of the one `Timeline`.
"""

from __future__ import annotations

import heapq
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds, StorageId
from rekindle.planners._sequence import Timeline as Line
from rekindle.policies.swap import Swap
from rekindle.schedule import Action, Compute, Free, SwapIn, SwapOut, Timeline

_AHEAD: Final = 16  # so many are looked at for one that is gone already and may come back


@final
class Carrier:
    """Says which copies begin between two steps. Told of every action, it knows the time."""

    def __init__(self, line: Line, budget: Bytes | None, swap: Swap) -> None:
        self.timeline = Timeline(line.problem.trace, budget, swap)
        self._line = line
        self._budget: Bytes | float = float("inf") if budget is None else budget
        self._memory = 0  # in use now
        self._planned = line.memory.copy()  # in use while each step runs, with what came ahead
        self._resident: set[StorageId] = set()
        self._unsent: dict[int, int] = {}  # what is to be copied out: when it first goes
        self._departures: list[tuple[int, int]] = []  # those of them that are there, by that
        self._arrivals: list[tuple[int, int, int]] = []  # (step, item, free to come from then on)
        self._ahead: set[int] = set()  # what came before its step
        self._visits: dict[int, int] = {}  # how often each item is still to come back
        self._read_arrivals()

    def _read_arrivals(self) -> None:
        line = self._line
        gone: dict[int, int] = {}  # the end of the life before
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
        self._arrivals.reverse()  # the next one last

    def follow(self, action: Action) -> None:
        """`action` happens."""
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
        """`items` were made for the first time."""
        for item in items:
            if item in self._unsent:
                heapq.heappush(self._departures, (self._unsent[item], item))

    def must_send(self, item: int) -> bool:
        """Whether `item`, which goes, has to be copied out now."""
        return self._unsent.pop(item, None) is not None

    def spent(self, item: int) -> bool:
        """Whether the copy of `item`, which goes, is of no use any more."""
        if self._visits.get(item) != 0:
            return False
        del self._visits[item]
        return True

    def came_ahead(self, item: int) -> bool:
        """Whether `item`, which has to be back now, was brought back before."""
        self._visits[item] -= 1
        if item not in self._ahead:
            return False
        self._ahead.remove(item)
        return True

    def departure(self, step: int) -> int | None:
        """What else is to be copied out before `step`."""
        if self.timeline.sent_until > self._soon(step):
            return None
        while self._departures:
            _, item = heapq.heappop(self._departures)
            if self._unsent.pop(item, None) is not None:
                return item
        return None

    def arrival(self, step: int) -> int | None:
        """What else begins to come back before `step`, ahead of when it has to."""
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
        """When `step` ends: a copy that begins by then leaves its way idle for no long."""
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
