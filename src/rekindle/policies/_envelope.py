"""The greatest of many lines at a time that only moves forward, without a look at all of them.

The benefit of letting go, bytes * (now - last) / cost, is a line in time. Lines stand in rows of
equal width. Of each row is known which line is on top, and until when: as in a kinetic heap, the
time at which the first steeper line of the row can overtake it. A search looks at the tops of all
rows, and into those rows only that changed or whose time is up. With n lines in rows of w that is
about n / w + w steps, vectorized, instead of n.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rekindle._types import Bytes, Nanoseconds

WIDTH: Final = 1024  # near the square root of the most lines that we expect

# Twice the worst relative error of a benefit, a product and a quotient of integers: a line that can
# be said to stay on top stays there, also among lines that are equal but for rounding.
_ERROR: Final = 4 * float(np.finfo(float).eps)

Floats = npt.NDArray[np.float64]


@final
class Envelope:
    """Lines in numbered slots. Ties go to the line with the greatest `order`."""

    def __init__(self, *, moving: bool) -> None:
        self._moving = moving  # False: benefit = bytes / cost
        self._vacant: list[int] = []
        self._dirty: set[int] = set()  # rows whose top must be found again
        self._used = 0
        self._grow(1)

    def _grow(self, rows: int) -> None:
        def wider(old: npt.NDArray[Any] | None, fill: float, *shape: int) -> npt.NDArray[Any]:
            new = np.full(shape, fill)
            if old is not None:
                new[: len(old)] = old
            return new

        get = self.__dict__.get
        self._bytes = wider(get("_bytes"), -1.0, rows, WIDTH)  # negative: no line in this slot
        self._cost = wider(get("_cost"), 1.0, rows, WIDTH)
        self._last = wider(get("_last"), -1.0, rows, WIDTH)
        self._order = wider(get("_order"), -1.0, rows, WIDTH)
        self._top = wider(get("_top"), 0.0, rows).astype(np.intp)  # the column of each row's top
        self._until = wider(get("_until"), np.inf, rows)

    def add(self, nbytes: Bytes, cost: float, last: Nanoseconds, order: int) -> int:
        """Returns the slot of the new line."""
        if self._vacant:
            slot = self._vacant.pop()
        else:
            slot = self._used
            self._used += 1
            if slot == self._bytes.size:
                self._grow(2 * len(self._bytes))
        row, column = divmod(slot, WIDTH)
        self._bytes[row, column] = nbytes
        self._cost[row, column] = cost
        self._last[row, column] = last
        self._order[row, column] = order
        self._dirty.add(row)
        return slot

    def remove(self, slot: int) -> None:
        row, column = divmod(slot, WIDTH)
        self._bytes[row, column] = self._last[row, column] = self._order[row, column] = -1.0
        self._cost[row, column] = 1.0
        self._vacant.append(slot)
        self._dirty.add(row)

    def reprice(self, slot: int, cost: float) -> None:
        row, column = divmod(slot, WIDTH)
        self._cost[row, column] = cost
        self._dirty.add(row)

    def access(self, slot: int, last: Nanoseconds) -> None:
        row, column = divmod(slot, WIDTH)
        self._last[row, column] = last
        self._dirty.add(row)

    def best(self, now: Nanoseconds) -> int:
        """The slot of the line that is greatest at `now`; there must be one."""
        if self._used <= WIDTH:  # one row: no need to know how long its top lasts
            used = slice(0, self._used)
            benefit = self._benefit(now, (0, used))
            return self._greatest(benefit, self._order[0, used])
        due = np.flatnonzero(self._until <= now)
        if len(due) or self._dirty:
            rows = {*due.tolist(), *self._dirty}
            self._find_tops(np.fromiter(rows, np.intp, len(rows)), now)
            self._dirty.clear()
        rows = np.arange(len(self._top))
        tops = (rows, self._top)
        row = self._greatest(self._benefit(now, tops), self._order[tops])
        return row * WIDTH + int(self._top[row])

    def _benefit(self, now: Nanoseconds, where: Any) -> Floats:
        """One rounding more than the exact quotient at most: equals stay equal."""
        if self._moving:
            return self._bytes[where] * (now - self._last[where]) / self._cost[where]
        return self._bytes[where] / self._cost[where]

    @staticmethod
    def _greatest(benefit: Floats, order: Floats) -> int:
        best = int(benefit.argmax())
        ties = np.flatnonzero(benefit == benefit[best])
        return best if len(ties) == 1 else int(ties[order[ties].argmax()])

    def _find_tops(self, rows: npt.NDArray[np.intp], now: Nanoseconds) -> None:
        benefit = self._benefit(now, rows)
        greatest = benefit.max(axis=1, keepdims=True)
        tops = np.where(benefit == greatest, self._order[rows], -2.0).argmax(axis=1)
        self._top[rows] = tops
        if not self._moving:
            return
        slope = self._bytes[rows] / self._cost[rows]
        slope_of_top = slope[np.arange(len(rows)), tops][:, None]
        steeper = slope > slope_of_top
        lead = np.maximum(greatest - benefit - _ERROR * np.abs(greatest), 0.0)
        gain = np.where(steeper, slope - slope_of_top + _ERROR * slope, 1.0)
        self._until[rows] = now + np.where(steeper, lead / gain, np.inf).min(axis=1)
