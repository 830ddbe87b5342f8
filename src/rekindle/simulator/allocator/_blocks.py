"""Model the blocks of an allocator, and its pools of segments with an index of free blocks.

A segment is a range of addresses that the allocator reserved from the device. It consists of
blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import final

from rekindle._types import Bytes


@final
class Block:
    """Piece of a segment, free or in use. `mapped` is True if device memory backs its addresses."""

    __slots__ = ("address", "following", "mapped", "nbytes", "pool", "previous", "used")

    def __init__(self, pool: Pool, address: int, nbytes: Bytes, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.mapped = mapped
        self.used = False
        self.previous: Block | None = None
        self.following: Block | None = None

    @property
    def end(self) -> int:
        return self.address + self.nbytes

    @property
    def whole(self) -> bool:
        """True if the block spans its whole segment."""
        return self.previous is None and self.following is None

    def onward(self) -> Iterator[Block]:
        """Yield this block and all following blocks of its segment."""
        block: Block | None = self
        while block is not None:
            yield block
            block = block.following

    def cut(self, nbytes: Bytes) -> Block:
        """Shrink this block to its first `nbytes` bytes, and return the rest as a new block."""
        begin, left = self.address + nbytes, self.nbytes - nbytes
        rest = Block(self.pool, begin, left, mapped=self.mapped)
        self.nbytes = nbytes
        rest.previous, rest.following = self, self.following
        if rest.following is not None:
            rest.following.previous = rest
        self.following = rest
        return rest

    def absorb(self) -> None:
        """Merge the following block into this one."""
        gone = self.following
        assert gone is not None
        self.nbytes += gone.nbytes
        self.following = gone.following
        if gone.following is not None:
            gone.following.previous = self

    def __repr__(self) -> str:
        state = "used" if self.used else "free" if self.mapped else "unmapped"
        return f"<{state} block: {self.nbytes} B at {self.address:#x}>"


@final
class Pool:
    """Segments for requests of one size class (small or large), with an index of free blocks.

    `segments` holds the first block of each segment. Free blocks are ordered by size, then by
    address; unmapped blocks by address.
    """

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.segments: dict[Block, None] = {}
        self._free: list[tuple[Bytes, int]] = []
        self._unmapped: list[int] = []
        self._at: dict[int, Block] = {}  # free and unmapped blocks, by address

    def put(self, block: Block) -> Block:
        """Merge a free or unmapped block with neighbors of its kind, and index the result."""
        behind, before = block.following, block.previous
        if behind is not None and not behind.used and behind.mapped == block.mapped:
            self.take(behind)
            block.absorb()
        if before is not None and not before.used and before.mapped == block.mapped:
            self.take(before)
            before.absorb()
            block = before
        self._at[block.address] = block
        if block.mapped:
            insort(self._free, (block.nbytes, block.address))
        else:
            insort(self._unmapped, block.address)
        return block

    def take(self, block: Block) -> None:
        """Remove a free or unmapped block from the index."""
        del self._at[block.address]
        if block.mapped:
            del self._free[bisect_left(self._free, (block.nbytes, block.address))]
        else:
            del self._unmapped[bisect_left(self._unmapped, block.address)]

    def free(self, least: Bytes = 0) -> Iterator[Block]:
        """Yield the free blocks of at least `least` bytes, the smallest first."""
        for _, address in self._free[bisect_left(self._free, (least, 0)) :]:
            yield self._at[address]

    def unmapped(self) -> Iterator[Block]:
        """Yield the unmapped blocks, the lowest address first."""
        for address in self._unmapped[:]:
            yield self._at[address]
