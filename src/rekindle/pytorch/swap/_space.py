"""Allocate parts of a swap file or of a slab of host memory: first fit, holes merged.

Source: Knuth, The Art of Computer Programming 1, section 2.5 (algorithms A and B). A backward pass
swaps values in in the reverse order of their swap-outs. So free parts are few, and the search for
one is short.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, final

from rekindle._types import Bytes

PAGE: Final = 4096
"""Unit of allocation. To write only a part of a page, the system would read the page first."""


def pages(nbytes: Bytes) -> Bytes:
    """Return `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@final
class Space:
    """A table of the used and free blocks in a swap file or a slab of `limit` bytes."""

    def __init__(self, limit: Bytes) -> None:
        self.limit = limit // PAGE * PAGE
        self.used: Bytes = 0
        # free blocks: (offset, bytes), sorted by offset
        self._holes: list[tuple[int, int]] = [(0, self.limit)]

    def take(self, nbytes: Bytes) -> int | None:
        """Reserve a block of `nbytes`. Return its offset, or None if no hole is large enough."""
        wanted = pages(nbytes)
        for index, (offset, size) in enumerate(self._holes):
            if size >= wanted:
                rest = [(offset + wanted, size - wanted)] if size > wanted else []
                self._holes[index : index + 1] = rest
                self.used += wanted
                return offset
        return None

    def give_back(self, offset: int, nbytes: Bytes) -> None:
        """Free the block at `offset`, which was reserved with the same `nbytes`."""
        start, end = offset, offset + pages(nbytes)
        self.used -= end - start
        index = after = bisect_left(self._holes, (start, 0))
        if index and sum(self._holes[index - 1]) == start:
            index -= 1
            start = self._holes[index][0]
        if after < len(self._holes) and self._holes[after][0] == end:
            end = sum(self._holes[after])
            after += 1
        self._holes[index:after] = [(start, end - start)]

    def check(self) -> None:
        """Assert that the holes are sorted and separate, and with `used` add up to `limit`."""
        end = -1
        for offset, size in self._holes:
            assert offset > end
            assert size > 0
            end = offset + size
        assert end <= self.limit
        assert sum(size for _, size in self._holes) == self.limit - self.used
