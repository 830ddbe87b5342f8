"""PyTorch's caching allocator for CUDA: what its two kinds have in common.

After c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.6; `malloc`, `free_block`, `try_merge_blocks`,
`should_split`, `release_cached_blocks`), with the settings that it has by default. A request is
rounded up, its pool finds the smallest free block that is large enough, and what is not needed of
that is cut off. Where there is none the device is asked for more; if that fails, all that is cached
and whole goes back to the device, and it is asked once more.

Missing: other streams, and events that hold blocks back; pools of CUDA graphs; `max_split_size_mb`,
`roundup_power2_divisions`, `garbage_collection_threshold`; the memory that the driver takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block, Pool
from rekindle.simulator.allocator._window import Choice, Loss, cheapest_window

MIB: Final = 2**20
GRAIN: Final = 512  #: every block is a multiple of it (kMinBlockSize)
SMALL: Final = MIB  #: the largest request of the small pool (kSmallSize)
SMALL_SEGMENT: Final = 2 * MIB  #: kSmallBuffer
LARGE_SEGMENT: Final = 20 * MIB  #: kLargeBuffer


def rounded(nbytes: Bytes) -> Bytes:
    """The least that a block for `nbytes` has (`round_size`)."""
    return max(GRAIN, -(-nbytes // GRAIN) * GRAIN)


class CachingAllocator(ABC):
    """Hands out blocks of a device that has `limit` bytes (None: as many as are asked for).

    `allocated` is the bytes of blocks in use, `reserved` those taken from the device; both with
    their peaks.
    """

    def __init__(self, limit: Bytes | None = None) -> None:
        self.limit: Bytes | float = float("inf") if limit is None else limit
        self.allocated: Bytes = 0
        self.allocated_peak: Bytes = 0
        self.reserved: Bytes = 0
        self.reserved_peak: Bytes = 0
        self.small, self.large = Pool(small=True), Pool(small=False)

    def allocate(self, nbytes: Bytes) -> Block | None:
        """A block of at least `nbytes`; None where there is no room in one piece."""
        nbytes = rounded(nbytes)
        pool = self.pool_for(nbytes)
        block = self._best_fit(pool, nbytes) or self._grow(pool, nbytes)
        if block is None:
            self.release()
            block = self._grow(pool, nbytes)
        if block is None:
            return None
        pool.take(block)
        block.used = True
        if self._splits(pool, block.nbytes - nbytes):
            pool.put(block.cut(nbytes))
        self.allocated += block.nbytes
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Takes back what `allocate` gave; the device does not get it yet."""
        self.allocated -= block.nbytes
        block.used = False
        block.pool.put(block)

    def pool_for(self, nbytes: Bytes) -> Pool:
        """Where a request of so many bytes goes."""
        return self.small if rounded(nbytes) <= SMALL else self.large

    @property
    def available(self) -> Bytes | float:
        """What the device has left."""
        return self.limit - self.reserved

    def cheapest(self, nbytes: Bytes, loss: Loss) -> list[Block]:
        """What goes for the least loss so that `nbytes` find a place in one piece; nothing where
        that cannot be."""
        choices = [way for way in self.ways(rounded(nbytes), loss) if way is not None]
        return min(choices, key=lambda choice: choice[0])[1] if choices else []

    def ways(self, nbytes: Bytes, loss: Loss) -> Iterator[Choice | None]:
        """What might go: neighbors in a segment of the pool."""
        for first in self.pool_for(nbytes).segments:
            yield cheapest_window(first.onward(), nbytes, loss)

    def segments(self) -> Iterator[Block]:
        """The first block of each."""
        for pool in (self.large, self.small):
            yield from pool.segments

    def check(self) -> None:
        """Asserts every invariant."""
        blocks = [block for first in self.segments() for block in first.onward()]
        idle: set[Block] = set()
        for pool in (self.large, self.small):
            assert all(first.previous is None for first in pool.segments), "it begins elsewhere"
            idle.update(pool.free(), pool.unmapped())
        assert idle == {block for block in blocks if not block.used}, "what is free is another"
        for block in blocks:
            behind = block.following
            assert block.nbytes > 0, f"{block}"
            assert block.nbytes % GRAIN == 0, f"{block}"
            assert block.mapped or not block.used, f"nothing is behind {block}"
            if behind is not None:
                assert behind.previous is block, f"{block} is not linked to {behind}"
                assert behind.address == block.end, f"{block} does not touch {behind}"
                alike = not (block.used or behind.used) and block.mapped == behind.mapped
                assert not alike, f"{block} and {behind} are not merged"
        blocks.sort(key=lambda block: block.address)
        for block, other in pairwise(blocks):
            assert block.end <= other.address, f"{block} and {other} overlap"
        allocated = sum(block.nbytes for block in blocks if block.used)
        reserved = sum(block.nbytes for block in blocks if block.mapped)
        assert self.allocated == allocated <= self.allocated_peak, "allocated is miscounted"
        assert self.reserved == reserved <= self.reserved_peak, "reserved is miscounted"
        assert self.reserved <= self.limit, "the device does not have as much"

    def _reserve(self, nbytes: Bytes) -> None:
        self.reserved += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _best_fit(self, pool: Pool, nbytes: Bytes) -> Block | None:
        return next(pool.free(nbytes), None)

    @abstractmethod
    def release(self) -> None:
        """Gives back to the device whatever nobody uses, as far as that can be given back."""

    @abstractmethod
    def _grow(self, pool: Pool, nbytes: Bytes) -> Block | None:
        """Takes from the device; returns a free block of at least `nbytes`, if it has as much."""

    @abstractmethod
    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        """Whether what a block has too much is a block of its own."""
