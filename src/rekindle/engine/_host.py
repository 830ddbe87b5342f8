"""What has a copy on the host, and what it would cost to have one more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._graph import Storage
from rekindle.policies import Swap, Ways

MOST_HIDDEN: Final = 0.9
"""A copy is made ahead if it pays even when no more than this part of the way back is hidden."""

BACKWARD: Final = 2
"""A backward pass takes so many times its forward pass: two products for each one."""


@final
class HostMemory:
    """Counts the copies on the host. An `Exchange` makes them and lets go of them."""

    def __init__(self, swap: Swap) -> None:
        self.limit = swap.host
        self.only = swap.only
        self.nbytes: Bytes = 0
        self.peak: Bytes = 0
        self.swapped_out: Bytes = 0  #: in all
        self.swapped_in: Bytes = 0  #: in all
        self.ways = Ways(swap)
        self.turn: Nanoseconds = 0  #: when a forward pass was last seen
        self.copies: dict[Storage, None] = {}
        self.saving: dict[Storage, Nanoseconds] = {}  #: copies made ahead, and when they end
        self.coming: dict[Storage, Nanoseconds] = {}  #: brought back ahead, not used since then
        self.refused: dict[Storage, None] = {}  #: no recipe, and no room for a copy

    def measured(
        self, *, out_bytes_per_s: int | None = None, in_bytes_per_s: int | None = None
    ) -> None:
        """What copies really take, as the driver measured it."""
        self.ways.measured(out_bytes_per_s, in_bytes_per_s)

    def take(self, storage: Storage) -> None:
        storage.on_host = True
        self.copies[storage] = None
        self.nbytes += storage.nbytes
        self.peak = max(self.peak, self.nbytes)
        self.swapped_out += storage.nbytes

    def drop(self, storage: Storage) -> None:
        storage.on_host = False
        del self.copies[storage]
        self.nbytes -= storage.nbytes

    def failed(self, storage: Storage) -> None:
        """There was no room for the copy that was just taken, so there is none for more."""
        self.drop(storage)
        self.swapped_out -= storage.nbytes
        self.limit = self.nbytes

    def lacks(self, nbytes: Bytes) -> Bytes:
        """How much must go before `nbytes` more fit; not above 0: they do."""
        return 0 if self.limit is None else self.nbytes + nbytes - self.limit

    def spare(self, nbytes: Bytes) -> list[Storage] | None:
        """Copies of residents, oldest first, without which `nbytes` more fit; None: never."""
        lacking = self.lacks(nbytes)
        found: list[Storage] = []
        for storage in self.copies:
            if lacking <= 0:
                break
            if storage.resident and storage not in self.saving:
                found.append(storage)
                lacking -= storage.nbytes
        return None if lacking > 0 else found

    def away(self) -> Iterator[Storage]:
        """What is on the host only."""
        return (storage for storage in self.copies if not storage.resident)

    def next_back(self, now: Nanoseconds) -> Storage | None:
        """What is away and wanted first, of what can be back before it is wanted."""
        found: Storage | None = None
        for storage in self.away():
            if storage.dead:
                continue
            wanted = self.turn + BACKWARD * (self.turn - storage.last_access)
            late = wanted < now + self.ways.in_ns(storage.nbytes)
            if late and storage.replayable and not self.only:
                continue
            if found is None or (storage.last_access, storage.id) > (found.last_access, found.id):
                found = storage
        return found

    def cost(self, storage: Storage) -> Nanoseconds:
        """Of having back what has a copy, or of a copy and having it back."""
        back = self.ways.in_ns(storage.nbytes)
        if not storage.on_host:
            return back + self.ways.out_ns(storage.nbytes)
        return min(back, storage.recipe_ns) if storage.replayable else back

    def worth_copying(self, storage: Storage, now: Nanoseconds) -> bool:
        """Whether a candidate has been unused for so long that it may stay so, and is dear enough
        for its bytes."""
        unused = now - storage.last_access
        if storage.on_host or unused < self.ways.out_ns(storage.nbytes):
            return False
        hidden = self.only or not storage.replayable
        return hidden or self.ways.in_ns(storage.nbytes) * (1 - MOST_HIDDEN) <= storage.cost

    def waiting(self, storage: Storage, now: Nanoseconds, *, ahead: bool) -> Nanoseconds:
        """What swapping `storage` out now would keep the program waiting for."""
        before = sum(s.nbytes for s in self.away() if s.last_access > storage.last_access)
        waiting = self.ways.waiting_in(storage.nbytes, before, now - storage.last_access)
        return waiting if ahead else waiting + self.ways.waiting_out(storage.nbytes, now)
