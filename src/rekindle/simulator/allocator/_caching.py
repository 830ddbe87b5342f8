"""Model PyTorch's caching allocator for CUDA: the base class of its variants.

The model follows c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.6; `malloc`, `free_block`,
`try_merge_blocks`, `should_split`, `release_cached_blocks`), with default settings. The size of a
request is rounded up. The pool for that size finds the smallest free block that is large enough,
and splits off the excess. If there is no such block, the allocator reserves more memory from the
device. If that fails, it returns all unused cached memory to the device, and tries once more.

Not modeled: other streams, and events that delay the reuse of blocks; pools of CUDA graphs;
`max_split_size_mb`, `roundup_power2_divisions`, `garbage_collection_threshold`; the memory of the
CUDA driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block, Pool
from rekindle.simulator.allocator._window import (
    Choice,
    Loss,
    Part,
    cheapest_release,
    cheapest_window,
)

MIB: Final = 2**20
GRAIN: Final = 512  #: the size of every block is a multiple of this number (kMinBlockSize)
SMALL: Final = MIB  #: the largest request of the small pool (kSmallSize)
SMALL_SEGMENT: Final = 2 * MIB  #: size of a segment of the small pool (kSmallBuffer)
LARGE_SEGMENT: Final = 20 * MIB  #: usual size of a segment of the large pool (kLargeBuffer)


def rounded(nbytes: Bytes) -> Bytes:
    """Return the size of the smallest block that can hold `nbytes` (PyTorch's `round_size`)."""
    return max(GRAIN, -(-nbytes // GRAIN) * GRAIN)


class CachingAllocator(ABC):
    """Simulated allocator of blocks of a device.

    Attributes:
        limit: The bytes of the device; infinite if there is no limit.
        allocated: The bytes of blocks in use.
        allocated_peak: The most bytes in use at once.
        reserved: The bytes reserved from the device.
        reserved_peak: The most bytes reserved at once.
        small: The pool for small requests.
        large: The pool for large requests.
    """

    def __init__(self, limit: Bytes | None = None) -> None:
        self.limit: Bytes | float = float("inf") if limit is None else limit
        self.allocated: Bytes = 0
        self.allocated_peak: Bytes = 0
        self.reserved: Bytes = 0
        self.reserved_peak: Bytes = 0
        self.small, self.large = Pool(small=True), Pool(small=False)
        # address of the next segment; a simulated address is never used a second time
        self._next_address = 0

    def allocate(self, nbytes: Bytes) -> Block | None:
        """Return a block of at least `nbytes`, or None if there is no contiguous free memory."""
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
        """Free a block. The allocator keeps the memory and does not return it to the device."""
        self.allocated -= block.nbytes
        block.used = False
        block.pool.put(block)

    def pool_for(self, nbytes: Bytes) -> Pool:
        """Return the pool (small or large) that serves a request of `nbytes`."""
        return self.small if rounded(nbytes) <= SMALL else self.large

    @property
    def available(self) -> Bytes | float:
        """The bytes that can still be reserved from the device."""
        return self.limit - self.reserved

    def cheapest(self, nbytes: Bytes, loss: Loss) -> list[Block]:
        """Return the blocks whose eviction makes a request fit, with the least sum of costs.

        Args:
            nbytes: The size of the request, which needs contiguous memory.
            loss: A function that returns the policy's cost of evicting a block's storage
                (`Chooser.loss`), or None if the storage cannot be evicted.

        Returns:
            The blocks, or an empty list if no evictions make the request fit.
        """
        choices = [way for way in self.ways(rounded(nbytes), loss) if way is not None]
        return min(choices, key=lambda choice: choice[0])[1] if choices else []

    def ways(self, nbytes: Bytes, loss: Loss) -> Iterator[Choice | None]:
        """Yield choices of blocks whose eviction makes a request for `nbytes` fit.

        These are the best window of adjacent blocks of each segment of the pool, and blocks whose
        memory can be returned to the device and reserved again.
        """
        for first in self.pool_for(nbytes).segments:
            yield cheapest_window(first.onward(), nbytes, loss)
        yield cheapest_release(self._parts(), self.from_device(nbytes) - self.available, loss)

    def segments(self) -> Iterator[Block]:
        """Yield the first block of each segment (memory that the allocator reserved at once)."""
        for pool in (self.large, self.small):
            yield from pool.segments

    def check(self) -> None:
        """Assert that all blocks, segments and totals are consistent. Tests call this."""
        blocks = [block for first in self.segments() for block in first.onward()]
        idle: set[Block] = set()
        for pool in (self.large, self.small):
            assert all(first.previous is None for first in pool.segments), "not a first block"
            idle.update(pool.free(), pool.unmapped())
        assert idle == {block for block in blocks if not block.used}, (
            "the index of free blocks is wrong"
        )
        for block in blocks:
            behind = block.following
            assert block.nbytes > 0, f"{block}"
            assert block.nbytes % GRAIN == 0, f"{block}"
            assert block.mapped or not block.used, f"{block} has no device memory"
            if behind is not None:
                assert behind.previous is block, f"{block} is not the block before {behind}"
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
        assert self.reserved <= self.limit, "more is reserved than the device has"

    def _reserve(self, nbytes: Bytes) -> None:
        self.reserved += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _best_fit(self, pool: Pool, nbytes: Bytes) -> Block | None:
        return next(pool.free(nbytes), None)

    def release(self) -> None:
        """Return unused memory to the device, as far as this variant of the allocator can."""
        for segment in [*self.large.free(), *self.small.free()]:
            if segment.whole:
                self._remove(segment)

    def _remove(self, segment: Block) -> None:
        """Return a segment, which is one free block, to the device."""
        segment.pool.take(segment)
        del segment.pool.segments[segment]
        self.reserved -= segment.nbytes

    def _grow(self, pool: Pool, nbytes: Bytes) -> Block | None:
        """Reserve memory from the device; return a free block of at least `nbytes`, or None."""
        nbytes = self.from_device(nbytes)
        if nbytes > self.available:
            return None
        segment = Block(pool, self._next_address, nbytes)
        self._next_address = segment.end
        pool.segments[segment] = None
        self._reserve(nbytes)
        return pool.put(segment)

    def _parts(self) -> Iterator[Part]:
        """Yield what can be returned to the device, as bytes and the blocks in use on them."""
        for first in self.segments():
            blocks = [*first.onward()]
            yield sum(block.nbytes for block in blocks), [block for block in blocks if block.used]

    @abstractmethod
    def from_device(self, nbytes: Bytes) -> Bytes:
        """Return the bytes that a request reserves if no reserved memory is free."""

    @abstractmethod
    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        """Return True if the `rest` bytes that a request does not need become a new block."""
