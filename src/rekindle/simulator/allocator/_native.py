"""Model PyTorch's caching allocator for CUDA with its default settings.

The segments of this allocator come from `cudaMalloc`, and their size never changes. A segment goes
back to the device only when all of it is free. The model follows c10/cuda/CUDACachingAllocator.cpp
(PyTorch 2.6): `get_allocation_size`, `alloc_block`, `should_split`, `release_blocks`.
"""

from __future__ import annotations

from typing import Final, final

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Pool
from rekindle.simulator.allocator._caching import (
    GRAIN,
    LARGE_SEGMENT,
    MIB,
    SMALL,
    SMALL_SEGMENT,
    CachingAllocator,
    rounded,
)

#: requests of this size or more get their own segment (kMinLargeAlloc)
OWN_SEGMENT: Final = 10 * MIB
#: the size of a request's own segment is a multiple of this number (kRoundLarge)
COARSE: Final = 2 * MIB


@final
class Native(CachingAllocator):
    """Allocator whose segments are divided into blocks and keep their size."""

    def from_device(self, nbytes: Bytes) -> Bytes:
        """Return the size of a new segment for a request (PyTorch's `get_allocation_size`)."""
        nbytes = rounded(nbytes)
        if nbytes <= SMALL:
            return SMALL_SEGMENT
        if nbytes < OWN_SEGMENT:
            return LARGE_SEGMENT
        return -(-nbytes // COARSE) * COARSE

    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        return rest >= GRAIN if pool.small else rest > SMALL
