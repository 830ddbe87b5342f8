"""Count the copies of swapped storages in host memory, and estimate what another copy costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.engine._graph import Storage
from rekindle.engine._step_order import StepOrder
from rekindle.policies import HostLink, Swap

MOST_HIDDEN: Final = 0.9
"""Largest share of a swap-in assumed to overlap with computation, if the copy was made ahead."""

BACKWARD: Final = 2
"""Assumed ratio of the durations of a backward pass and its forward pass.

The backward pass of a matrix product is two matrix products.
"""


@final
class HostMemory:
    """Bookkeeping of the copies in host memory. An `Exchange` decides which copies to make."""

    def __init__(self, swap: Swap) -> None:
        self.limit = swap.host
        self.only = swap.only
        self.nbytes: Bytes = 0
        self.peak: Bytes = 0
        self.swapped_out: Bytes = 0  #: total bytes of all swap-outs so far
        self.swapped_in: Bytes = 0  #: total bytes of all swap-ins so far
        self.link = HostLink(swap)
        #: the order in which steps use sources
        self.order = StepOrder()
        #: the engine's clock (ns) after the last operator of the forward pass
        self.turn: Nanoseconds = 0
        self.copies: dict[Storage, None] = {}
        #: Storages being copied ahead of their eviction, with the end (ns) of the transfer.
        self.saving: dict[Storage, Nanoseconds] = {}
        #: Prefetched storages that are not used yet, with their last access (ns).
        self.coming: dict[Storage, Nanoseconds] = {}
        #: Storages without a recipe for which the host had no room.
        self.refused: dict[Storage, None] = {}
        #: Storages without a recipe that the driver found to be written since they were copied.
        #: They are copied again when they are evicted.
        self.outdated: set[Storage] = set()

    def measured(
        self, *, out_bytes_per_s: int | None = None, in_bytes_per_s: int | None = None
    ) -> None:
        """Set the bandwidths of swap-out and swap-in to those that the driver measured."""
        self.link.measured(out_bytes_per_s, in_bytes_per_s)

    def take(self, storage: Storage) -> None:
        """Count a new copy of `storage` on the host."""
        storage.on_host = True
        self.copies[storage] = None
        self.nbytes += storage.nbytes
        self.peak = max(self.peak, self.nbytes)
        self.swapped_out += storage.nbytes

    def drop(self, storage: Storage) -> None:
        """Stop counting the host copy of `storage`."""
        storage.on_host = False
        del self.copies[storage]
        self.outdated.discard(storage)
        self.nbytes -= storage.nbytes

    def failed(self, storage: Storage) -> None:
        """Undo `take` after a failed copy, and lower the host's limit to the bytes it holds."""
        self.drop(storage)
        self.swapped_out -= storage.nbytes
        self.limit = self.nbytes

    def lacks(self, nbytes: Bytes) -> Bytes:
        """Return how many bytes of copies must be discarded before a copy of `nbytes` fits.

        The result is 0 or less if the copy fits now.
        """
        return 0 if self.limit is None else self.nbytes + nbytes - self.limit

    def spare(self, nbytes: Bytes) -> list[Storage] | None:
        """Select host copies to discard, oldest first, so that a copy of `nbytes` fits.

        Only copies of resident storages are selected.

        Returns:
            The storages whose copies to discard, or None if all such copies are not enough.
        """
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
        """Iterate over the storages that exist on the host only."""
        return (storage for storage in self.copies if not storage.resident)

    def next_back(self, now: Nanoseconds, *, sources: bool) -> Storage | None:
        """Return the storage to swap in next, ahead of its use, or None.

        A backward pass reads values in reverse order, so the storage used last is read first. A
        recomputable storage is skipped if its transfer would end after its expected use.

        Args:
            now: Current time of the engine.
            sources: Consider storages without a recipe as well.
        """
        found: Storage | None = None
        for storage in self.away():
            if storage.dead or not (sources or storage.replayable):
                continue
            wanted = self.turn + BACKWARD * (self.turn - storage.last_access)
            late = wanted < now + self.link.in_ns(storage.nbytes)
            if late and storage.replayable and not self.only:
                continue
            if found is None or (storage.last_access, storage.id) > (found.last_access, found.id):
                found = storage
        return found

    def cost(self, storage: Storage) -> Nanoseconds:
        """Return the cost (ns) of bringing `storage` back.

        If it has no copy on the host yet, the cost includes the swap-out.
        """
        back = self.link.in_ns(storage.nbytes)
        if not storage.on_host:
            return back + self.link.out_ns(storage.nbytes)
        return min(back, storage.recipe_ns) if storage.replayable else back

    def worth_copying(self, storage: Storage, now: Nanoseconds) -> bool:
        """Return True if a copy of `storage` should be made ahead of its eviction.

        The storage must have been unused for at least the duration of its swap-out. Its cost must
        exceed the part of the swap-in that cannot overlap with computation.
        """
        unused = now - storage.last_access
        if storage.on_host or unused < self.link.out_ns(storage.nbytes):
            return False
        if not storage.replayable and self.order.known:
            return False  # once the order of sources is known, they are copied when they leave
        hidden = self.only or not storage.replayable
        return hidden or self.link.in_ns(storage.nbytes) * (1 - MOST_HIDDEN) <= storage.cost

    def waiting(self, storage: Storage, now: Nanoseconds, *, ahead: bool) -> Nanoseconds:
        """Return the time (ns) that the program would wait if `storage` were swapped out now.

        Args:
            storage: The storage.
            now: Current time of the engine.
            ahead: True for a copy made ahead of eviction: the program does not wait for the
                swap-out.
        """
        before = sum(s.nbytes for s in self.away() if s.last_access > storage.last_access)
        waiting = self.link.waiting_in(storage.nbytes, before, now - storage.last_access)
        return waiting if ahead else waiting + self.link.waiting_out(storage.nbytes, now)
