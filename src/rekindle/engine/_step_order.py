"""Learn in which order the steps of a program use its sources, and predict the next use of each.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966: evict what is used furthest in the future. For pages of equal size this needs
the fewest transfers. Here sizes differ, and a copy to the host is needed only after a write, so the
order is a good one, and not always the best.

A step of training uses weights, gradients and optimizer state in the same order as the step before.
The **place** of a use is the number of calls of the program since the step began. A storage that
each step makes, such as a gradient, is taken for the one that was first used at the same place in
the last step, and has the same size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, final

from rekindle._types import Bytes
from rekindle.engine._graph import Storage

NEVER: Final = 2**40
"""The distance (calls) of a use that is not expected: more than any step has."""

_SIMILAR: Final = 8
"""Steps look alike if their numbers of calls differ by at most this fraction of the longer one."""


MOST_CALLS: Final = 2**20
"""A step of more calls has no order. Scenario: a program that takes no steps of optimizers."""


@final
class Uses:
    """The places at which one storage is used in a step."""

    __slots__ = ("before", "new", "now")

    def __init__(self, before: list[int], *, new: bool) -> None:
        self.before = before  #: in the last step
        self.now: list[int] = []  #: in this step so far
        self.new = new  #: True if the storage has begun to exist in this step, as in the last one


@final
class StepOrder:
    """The uses of all sources in the last step, and in this one so far."""

    def __init__(self) -> None:
        self.place = 0  #: number of calls since the step began
        #: True if the last step tells the order of this one
        self.known = False
        self._length = 0  # number of calls of the last step; 0: no step has ended
        self._used: list[Uses] = []  # storages used in this step
        # Storages first used in the last step and in this one, by place and size.
        self._first: dict[tuple[int, Bytes], list[Uses]] = {}
        self._first_now: dict[tuple[int, Bytes], list[Uses]] = {}

    def used(self, storage: Storage) -> None:
        """Note that the program uses the source `storage` now."""
        if self.place > MOST_CALLS:
            self._forget()
        uses = storage.uses
        if uses is None:
            key = self.place, storage.nbytes
            same = self._first.get(key)
            before = same.pop(0) if same else None
            uses = storage.uses = Uses(before.before if before else [], new=before is not None)
            self._first_now.setdefault(key, []).append(uses)
        if not uses.now:
            self._used.append(uses)
        if not uses.now or uses.now[-1] != self.place:
            uses.now.append(self.place)

    def _forget(self) -> None:
        """Forget all uses, so that their number is limited."""
        for uses in self._used:
            uses.before, uses.now = [], []
        self._used, self._first, self._first_now = [], {}, {}
        self.place, self.known, self._length = 0, False, 0

    def step(self) -> None:
        """Note that a step ends here, and the next one begins."""
        longer = max(self.place, self._length)
        alike = _SIMILAR * abs(self.place - self._length) <= longer
        self.known = self.place > 0 and (alike or not self._length)
        self._length, self.place = self.place, 0
        for uses in self._used:
            uses.before, uses.now, uses.new = uses.now, [], False
        self._used = []
        self._first, self._first_now = self._first_now, {}

    def distance(self, storage: Storage) -> int | None:
        """Return the number of calls until the next use of `storage`, or None if it is unknown."""
        uses = storage.uses
        if not self.known or uses is None or not uses.before:
            return None
        at = bisect_left(uses.before, self.place)
        if at < len(uses.before):
            return uses.before[at] - self.place
        return NEVER if uses.new else self._length - self.place + uses.before[0]

    def furthest(self, storages: Iterable[Storage], than: int) -> Storage | None:
        """Return the source that is used last, after more than `than` calls, or None."""
        found = None
        for storage in storages:
            distance = None if storage.replayable else self.distance(storage)
            if distance is not None and distance > than:
                found, than = storage, distance
        return found

    def nearest(self, storages: Iterable[Storage]) -> Storage | None:
        """Return the source that is used first, or None if none is expected to be used."""
        found, least = None, NEVER
        for storage in storages:
            distance = None if storage.replayable else self.distance(storage)
            if distance is not None and distance < least:
                found, least = storage, distance
        return found
