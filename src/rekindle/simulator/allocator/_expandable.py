"""Model PyTorch's caching allocator for CUDA with `expandable_segments:True`.

Each pool has one range of addresses. Memory is mapped page by page, at the lowest unmapped
addresses that are wide enough. Pages that are entirely free are unmapped before an allocation
fails.

The model follows c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.6): Note [Expandable Segments],
`find_expandable_block`, `try_allocate_expandable_block`, `map_block`, `unmap_block`, and the search
for a block in `get_free_block`. Two details are not modeled. The range of addresses has no end, but
in PyTorch a second range begins at 9/8 of the device's memory. The check of
`set_per_process_memory_fraction` is left out; it counts more memory than is mapped in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from rekindle._types import Bytes
from rekindle.simulator.allocator._blocks import Block, Pool
from rekindle.simulator.allocator._caching import (
    GRAIN,
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    CachingAllocator,
)
from rekindle.simulator.allocator._window import Part

RANGE: Final = 2**30 * LARGE_SEGMENT  # larger than any device; a multiple of both page sizes


@final
class Expandable(CachingAllocator):
    """Allocator with one segment per pool, which grows by pages. Free pages are unmapped."""

    def __init__(self, limit: Bytes | None = None) -> None:
        super().__init__(limit)
        for pool, begin in (self.large, 0), (self.small, RANGE):
            everything = Block(pool, begin, RANGE, mapped=False)
            pool.segments[everything] = None
            pool.put(everything)

    def release(self) -> None:
        for pool in (self.large, self.small):
            for block in list(pool.free()):
                self._unmap(pool, block)

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Unmap the pages that lie wholly within the free `block`."""
        page = _page(pool)
        begin, end = -(-block.address // page) * page, block.end // page * page
        if begin >= end:
            return
        pool.take(block)
        gap = block.cut(begin - block.address) if block.address < begin else block
        rest = gap.cut(end - begin) if gap.end > end else None
        gap.mapped = False
        for left in (block, rest):
            if left is not None and left.mapped:
                pool.put(left)
        pool.put(gap)
        self.reserved -= end - begin

    def from_device(self, nbytes: Bytes) -> Bytes:
        """Return the bytes of the pages that a request needs."""
        page = _page(self.pool_for(nbytes))
        return -(-nbytes // page) * page

    def _parts(self) -> Iterator[Part]:
        """Yield each mapped page, which can be unmapped, and mapped again at another address."""
        for first in self.segments():
            yield from _pages(first)

    def _best_fit(self, pool: Pool, nbytes: Bytes) -> Block | None:
        """Return a free block of at least `nbytes`, or None.

        The smallest such block is returned, with one exception. If the next larger block would be
        the smaller one after both had grown into the unmapped memory behind them, that block is
        returned.
        """
        best: Block | None = None
        for block in pool.free(nbytes):
            if best is not None and _could_be(block) >= _could_be(best):
                break
            best = block
        return best

    def _grow(self, pool: Pool, nbytes: Bytes) -> Block | None:
        block = next(found for gap in pool.unmapped() if (found := _wide_enough(gap, nbytes)))
        if not block.mapped:
            mapped = self._map(pool, block, nbytes)
            if mapped is None:
                return None
            block = mapped
        while block.nbytes < nbytes:
            gap = block.following
            assert gap is not None
            mapped = self._map(pool, gap, nbytes - block.nbytes)
            if mapped is None:
                return None
            block = mapped
        return block

    def _map(self, pool: Pool, gap: Block, nbytes: Bytes) -> Block | None:
        """Map pages from the start of the unmapped block `gap`, for `nbytes` or all of `gap`.

        Returns:
            The free block with the new pages, or None if the device has too little memory.
        """
        page = _page(pool)
        nbytes = min(-(-nbytes // page) * page, gap.nbytes)
        if nbytes > self.available:
            return None
        pool.take(gap)
        rest = gap.cut(nbytes) if nbytes < gap.nbytes else None
        gap.mapped = True
        if rest is not None:
            pool.put(rest)
        self._reserve(nbytes)
        return pool.put(gap)

    def _splits(self, pool: Pool, rest: Bytes) -> bool:
        return rest >= GRAIN


def _page(pool: Pool) -> Bytes:
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def _pages(first: Block) -> Iterator[Part]:
    """Yield for each mapped page of a segment the page's bytes and the blocks in use on it."""
    page, blocks_on = _page(first.pool), dict[int, list[Block]]()
    for block in first.onward():
        if block.mapped:
            for number in range(block.address // page, -(-block.end // page)):
                blocks_on.setdefault(number, []).extend([block] * block.used)
    for blocks in blocks_on.values():
        yield page, blocks


def _could_be(block: Block) -> Bytes:
    """Return the size that a block would have if the unmapped gap behind it were mapped."""
    behind = block.following
    return block.nbytes + (behind.nbytes if behind is not None and not behind.mapped else 0)


def _wide_enough(gap: Block, nbytes: Bytes) -> Block | None:
    """Return the block at which `nbytes` contiguous bytes would begin if `gap` were mapped.

    This is the free block before `gap`, or `gap` if the block before is in use. Return None if both
    together are too small.
    """
    before = gap.previous
    first = before if before is not None and not before.used else gap
    width = 0
    for block in first.onward():
        if block.used:
            return None
        width += block.nbytes
        if width >= nbytes:
            return first
    return None
