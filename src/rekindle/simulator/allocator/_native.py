"""Model PyTorch's caching allocator for CUDA with its default settings.

The segments of this allocator come from `cudaMalloc`, and their size never changes. The model
follows c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.6): `get_allocation_size`, `alloc_block`,
`should_split`, `release_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block, Pool
from rekindle.simulator.allocator._caching import (
    GRAIN,
    LARGE_SEGMENT,
    MIB,
    SMALL,
    SMALL_SEGMENT,
    CachingAllocator,
    rounded,
)
from rekindle.simulator.allocator._window import Choice, Loss, cheapest_release

#: requests of this size or more get their own segment (kMinLargeAlloc)
OWN_SEGMENT: Final = 10 * MIB
#: the size of a request's own segment is a multiple of this number (kRoundLarge)
COARSE: Final = 2 * MIB


def segment_bytes(nbytes: Bytes) -> Bytes:
    """Return the size of a new segment for a request (PyTorch's `get_allocation_size`)."""
    nbytes = rounded(nbytes)
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    if nbytes < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-nbytes // COARSE) * COARSE


@final
class Native(CachingAllocator):
    """Allocator that returns a segment to the device only when the whole segment is free."""

    def __init__(self, limit: Bytes | None = None) -> None:
        super().__init__(limit)
        # address of the next segment; a simulated address is never used a second time
        self._next_address = 0

    def release(self) -> None:
        for pool in (self.large, self.small):
            for block in list(pool.free()):
                if block.whole:
                    pool.take(block)
                    del pool.segments[block]
                    self.reserved -= block.nbytes

    def ways(self, nbytes: Bytes, loss: Loss) -> Iterator[Choice | None]:
        yield from super().ways(nbytes, loss)
        missing = segment_bytes(nbytes) - self.available
        yield cheapest_release(map(_whole, self.segments()), missing, loss)

    def _grow(self, pool: Pool, nbytes: Bytes) -> Block | None:
        nbytes = segment_bytes(nbytes)
        if nbytes > self.available:
            return None
        segment = Block(pool, self._next_address, nbytes)
        self._next_address = segment.end
        pool.segments[segment] = None
        self._reserve(nbytes)
        return pool.put(segment)

    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        return rest >= GRAIN if pool.small else rest > SMALL


def _whole(first: Block) -> tuple[Bytes, list[Block]]:
    """Return the bytes of a segment, and its blocks in use."""
    blocks = [*first.onward()]
    return sum(block.nbytes for block in blocks), [block for block in blocks if block.used]
