"""The greatest of many lines at a time that only moves forward, without a look at all of them.

The benefit of letting go, bytes * (now - last) / cost, is a line in time. Among a few thousand all
are looked at, and again only those that are repriced meanwhile. More of them stand in rows of equal
width. Of each row is known which line is on top, and until when: as in a kinetic heap, the time at
which the first steeper line of the row can overtake it. A search looks at the tops of all rows, and
into those rows only that changed or whose time is up. With n lines in rows of w that is about
n / w + w steps, vectorized, instead of n.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rekindle._types import Bytes, Nanoseconds

WIDTH: Final = 1024  # near the square root of the most lines that we expect
FEW: Final = 4 * WIDTH  # of so many all are looked at in less time than a row's top is found

# Twice the worst relative error of a benefit, a product and a quotient of integers: a line that can
# be said to stay on top stays there, also among lines that are equal but for rounding.
_ERROR: Final = 4 * float(np.finfo(float).eps)

Floats = npt.NDArray[np.float64]


@final
class Envelope:
    """Lines in numbered slots. Ties go to the line with the greatest `order`."""

    def __init__(self, *, moving: bool, few: int = FEW) -> None:
        self._moving = moving  # False: benefit = bytes / cost
        self._few = few
        self._vacant: list[int] = []
        self._dirty: set[int] = set()  # rows whose top must be found again
        self._used = 0
        self._now: Nanoseconds = 0  # of the last search
        self._benefits: Floats | None = None  # of all lines then; None: not known any more
        self._grow(1)

    def _grow(self, rows: int) -> None:
        def longer(old: npt.NDArray[Any] | None, new: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if old is not None:
                new[: len(old)] = old
            return new

        get = self.__dict__.get
        slots = rows * WIDTH
        self._bytes = longer(get("_bytes"), np.full(slots, -1.0))  # negative: no line in this slot
        self._cost = longer(get("_cost"), np.full(slots, 1.0))
        self._last = longer(get("_last"), np.full(slots, -1.0))
        self._order = longer(get("_order"), np.full(slots, -1.0))
        self._top = longer(get("_top"), np.arange(0, slots, WIDTH))  # the slot of each row's top
        self._until = longer(get("_until"), np.full(rows, np.inf))

    def add(self, cost: float) -> int:
        """Returns the slot of a new line, which counts once it is renewed."""
        if self._vacant:
            slot = self._vacant.pop()
        else:
            slot = self._used
            self._used += 1
            if slot == len(self._bytes):
                self._grow(2 * len(self._top))
        self._cost[slot] = cost
        return slot

    def remove(self, slot: int) -> None:
        self._cost[slot] = 1.0
        self.renew(slot, -1, -1, -1)
        self._vacant.append(slot)

    def renew(self, slot: int, nbytes: Bytes, last: Nanoseconds, order: int) -> None:
        """All but the cost of a line."""
        self._bytes[slot] = nbytes
        self._last[slot] = last
        self._order[slot] = order
        self._dirty.add(slot // WIDTH)
        self._benefits = None

    def reprice(self, slot: int, cost: float) -> None:
        self._cost[slot] = cost
        self._dirty.add(slot // WIDTH)
        if self._benefits is not None:
            self._benefits[slot] = self._benefit_of(slot, self._now)

    def best(self, now: Nanoseconds) -> int:
        """The slot of the line that is greatest at `now`; there must be one."""
        if self._used > self._few:
            return self._best_of_rows(now)
        used = slice(0, self._used)
        benefits = self._benefits
        if benefits is None or now != self._now:
            self._now = now
            self._benefits = benefits = self._benefit_of(used, now)
        return self._greatest(benefits, self._order[used])

    def _best_of_rows(self, now: Nanoseconds) -> int:
        due = np.flatnonzero(self._until <= now)
        if len(due) or self._dirty:
            rows = {*due.tolist(), *self._dirty}
            self._find_tops(np.fromiter(rows, np.intp, len(rows)), now)
            self._dirty.clear()
        row = self._greatest(self._benefit_of(self._top, now), self._order[self._top])
        return int(self._top[row])

    def _benefit_of(self, slots: Any, now: Nanoseconds) -> Any:
        return self._benefit(self._bytes[slots], self._last[slots], self._cost[slots], now)

    def _benefit(self, nbytes: Any, last: Any, cost: Any, now: Nanoseconds) -> Any:
        """One rounding more than the exact quotient at most: equals stay equal."""
        return nbytes * (now - last) / cost if self._moving else nbytes / cost

    @staticmethod
    def _greatest(benefit: Floats, order: Floats) -> int:
        best = int(benefit.argmax())
        ties = (benefit == benefit[best]).nonzero()[0]
        return best if len(ties) == 1 else int(ties[order[ties].argmax()])

    def _find_tops(self, rows: npt.NDArray[np.intp], now: Nanoseconds) -> None:
        nbytes, cost, last, order = (
            lines.reshape(-1, WIDTH)[rows]
            for lines in (self._bytes, self._cost, self._last, self._order)
        )
        benefit: Floats = self._benefit(nbytes, last, cost, now)
        greatest = benefit.max(axis=1, keepdims=True)
        tops = np.where(benefit == greatest, order, -2.0).argmax(axis=1)
        self._top[rows] = rows * WIDTH + tops
        if not self._moving:
            return
        slope = nbytes / cost
        slope_of_top = slope[np.arange(len(rows)), tops][:, None]
        steeper = slope > slope_of_top
        lead = np.maximum(greatest - benefit - _ERROR * np.abs(greatest), 0.0)
        gain = np.where(steeper, slope - slope_of_top + _ERROR * slope, 1.0)
        self._until[rows] = now + np.where(steeper, lead / gain, np.inf).min(axis=1)
