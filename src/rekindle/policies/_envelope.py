"""A data structure that finds the greatest of many lines at a time that only moves forward.

The benefit of evicting a storage, bytes * (now - last access) / cost, is a linear function of time,
here called a line. The next storage to evict is the one with the greatest benefit now. This file
finds it without computing the benefit of every storage.

Up to `FEW` lines are all evaluated, as one vector. More lines are divided into rows of `WIDTH`
lines. Each row stores which of its lines is greatest (the top), and until when. The top may change
when the first steeper line of the row can overtake it, as in a kinetic heap. A search compares the
tops of all rows. It examines the lines of a row only if one of them changed, or if the time of the
top has passed. With n lines in rows of w, a search takes about n / w + w vectorized steps instead
of n.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rekindle._types import Bytes, Nanoseconds

WIDTH: Final = 1024  # lines per row: near the square root of the largest expected number of lines
# Up to this many lines, evaluating all lines is faster than keeping a top line for each row.
FEW: Final = 4 * WIDTH

#: Twice the worst relative error of a benefit (a product and a quotient of integers). This margin
#: ensures that rounding never makes the stored time of a row's top too late.
_ERROR: Final = 4 * float(np.finfo(float).eps)

Floats = npt.NDArray[np.float64]


@final
class Envelope:
    """Finds the candidate whose eviction has the greatest benefit at a given time.

    The benefit of a candidate is a linear function of time, called its line. Each line is stored in
    a slot, an index of arrays.
    """

    def __init__(self, *, moving: bool, few: int = FEW) -> None:
        self._moving = moving  # False: the benefit is bytes / cost, without staleness
        self._few = few
        self._vacant: list[int] = []
        self._dirty: set[int] = set()  # rows whose top line must be found again
        self._used = 0
        self._now: Nanoseconds = 0  # latest time for which benefits were computed
        self._benefits: Floats | None = None  # benefits of all lines at `_now`; None: not computed
        self._grow(1)

    def _grow(self, rows: int) -> None:
        """Enlarge all arrays of the table to `rows` rows, and keep their contents."""

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
        # For each row, the slot of its top line (the one with the greatest benefit).
        self._top = longer(get("_top"), np.arange(0, slots, WIDTH))
        # Time until which each row's top is certainly the greatest line of the row.
        self._until = longer(get("_until"), np.full(rows, np.inf))

    def add(self, cost: float) -> int:
        """Reserve a slot for the line of a candidate's benefit.

        Returns:
            The slot. The line takes part in searches after `renew`.
        """
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
        """Remove the line in `slot`, and make the slot vacant."""
        self._cost[slot] = 1.0
        self.renew(slot, -1, -1, -1)
        self._vacant.append(slot)

    def renew(self, slot: int, nbytes: Bytes, last: Nanoseconds, order: int) -> None:
        """Set size, last access and order of the storage whose line is in `slot`."""
        self._bytes[slot] = nbytes
        self._last[slot] = last
        self._order[slot] = order
        self._dirty.add(slot // WIDTH)
        self._benefits = None

    def reprice(self, slot: int, cost: float) -> None:
        """Set the cost of the storage whose line is in `slot`."""
        self._cost[slot] = cost
        self._dirty.add(slot // WIDTH)
        if self._benefits is not None:
            self._benefits[slot] = self._benefit_of(slot, self._now)

    def best(self, now: Nanoseconds) -> int:
        """Return the slot with the greatest benefit at the time `now`. There must be a line."""
        if self._used > self._few:
            return self._best_of_rows(now)
        used = slice(0, self._used)
        benefits = self._benefits
        if benefits is None or now != self._now:
            self._now = now
            self._benefits = benefits = self._benefit_of(used, now)
        return self._greatest(benefits, self._order[used])

    def _best_of_rows(self, now: Nanoseconds) -> int:
        """Return the slot with the greatest benefit by comparing the top lines of all rows."""
        due = np.flatnonzero(self._until <= now)
        if len(due) or self._dirty:
            rows = {*due.tolist(), *self._dirty}
            self._find_tops(np.fromiter(rows, np.intp, len(rows)), now)
            self._dirty.clear()
        row = self._greatest(self._benefit_of(self._top, now), self._order[self._top])
        return int(self._top[row])

    def _benefit_of(self, slots: Any, now: Nanoseconds) -> Any:
        """Return the benefits at `now` of the storages whose lines are in `slots`."""
        return self._benefit(self._bytes[slots], self._last[slots], self._cost[slots], now)

    def _benefit(self, nbytes: Any, last: Any, cost: Any, now: Nanoseconds) -> Any:
        """Return bytes * staleness / cost. One product and one quotient are rounded, in that order.

        So storages with equal scores have equal benefits.
        """
        return nbytes * (now - last) / cost if self._moving else nbytes / cost

    @staticmethod
    def _greatest(benefit: Floats, order: Floats) -> int:
        """Return the index of the greatest benefit; of equal ones, the greatest order wins."""
        best = int(benefit.argmax())
        ties = (benefit == benefit[best]).nonzero()[0]
        return best if len(ties) == 1 else int(ties[order[ties].argmax()])

    def _find_tops(self, rows: npt.NDArray[np.intp], now: Nanoseconds) -> None:
        """Find the top line of each row in `rows`, and the time until which it stays the top."""
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
        # A steeper line overtakes the top after the time lead / gain. Rounding errors are counted
        # in favor of the steeper line.
        slope = nbytes / cost
        slope_of_top = slope[np.arange(len(rows)), tops][:, None]
        steeper = slope > slope_of_top
        lead = np.maximum(greatest - benefit - _ERROR * np.abs(greatest), 0.0)
        gain = np.where(steeper, slope - slope_of_top + _ERROR * slope, 1.0)
        self._until[rows] = now + np.where(steeper, lead / gain, np.inf).min(axis=1)
