"""Which parts of a file, or of a slab, are taken: first fit, neighbors merged when given back.

Knuth, The Art of Computer Programming 1, section 2.5 (algorithms A and B). Values come back in the
opposite order of that in which they left, so that the holes are few and the search is short.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, final

from rekindle._types import Bytes

PAGE: Final = 4096
"""Blocks are whole pages: a part of one would have to be read before it can be written."""


def pages(nbytes: Bytes) -> Bytes:
    """`nbytes`, up to the next whole page."""
    return -(-nbytes // PAGE) * PAGE


@final
class Space:
    """Offsets below `limit` bytes."""

    def __init__(self, limit: Bytes) -> None:
        self.limit = limit // PAGE * PAGE
        self.used: Bytes = 0
        self._holes: list[tuple[int, int]] = [(0, self.limit)]  # (offset, bytes), by offset

    def take(self, nbytes: Bytes) -> int | None:
        """The offset of a free block of `nbytes`; None if there is none in one piece."""
        wanted = pages(nbytes)
        for index, (offset, size) in enumerate(self._holes):
            if size >= wanted:
                rest = [(offset + wanted, size - wanted)] if size > wanted else []
                self._holes[index : index + 1] = rest
                self.used += wanted
                return offset
        return None

    def give_back(self, offset: int, nbytes: Bytes) -> None:
        """The block at `offset`, taken with the same `nbytes`, is free again."""
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
        """Asserts the invariants: holes in order, apart, inside, and all that is not used."""
        end = -1
        for offset, size in self._holes:
            assert offset > end
            assert size > 0
            end = offset + size
        assert end <= self.limit
        assert sum(size for _, size in self._holes) == self.limit - self.used
