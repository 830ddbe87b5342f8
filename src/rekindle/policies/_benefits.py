"""Compute the benefits of evicting many storages at once, and find the greatest.

The benefit of evicting a storage is bytes * (now - last access) / cost. All benefits are one vector
of NumPy, so a search looks at every storage. The native core's `Envelope` does not, and gives the
same storage.
"""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rekindle._types import Bytes, Nanoseconds

_FIRST: Final = 1024  # number of slots at first

Floats = npt.NDArray[np.float64]


@final
class Benefits:
    """Finds the candidate whose eviction has the greatest benefit at a given time.

    Each candidate has a slot, an index of arrays.
    """

    def __init__(self, *, moving: bool) -> None:
        self._moving = moving  # False: the benefit is bytes / cost, without staleness
        self._vacant: list[int] = []
        self._used = 0
        self._now: Nanoseconds = 0  # latest time for which benefits were computed
        self._benefits: Floats | None = None  # all benefits at `_now`; None: not computed
        self._bytes = np.full(_FIRST, -1.0)  # negative: no candidate has this slot
        self._cost = np.full(_FIRST, 1.0)
        self._last = np.full(_FIRST, -1.0)
        self._order = np.full(_FIRST, -1.0)

    def add(self, cost: float) -> int:
        """Reserve a slot for a candidate.

        Returns:
            The slot. It takes part in searches after `renew`.
        """
        if self._vacant:
            slot = self._vacant.pop()
        else:
            slot = self._used
            self._used += 1
            if slot == len(self._bytes):
                for name in ("_bytes", "_cost", "_last", "_order"):
                    setattr(self, name, np.tile(getattr(self, name), 2))
        self._cost[slot] = cost
        return slot

    def remove(self, slot: int) -> None:
        """Make `slot` vacant."""
        self._cost[slot] = 1.0
        self.renew(slot, -1, -1, -1)
        self._vacant.append(slot)

    def renew(self, slot: int, nbytes: Bytes, last: Nanoseconds, order: int) -> None:
        """Set size, last access and order of the storage in `slot`."""
        self._bytes[slot] = nbytes
        self._last[slot] = last
        self._order[slot] = order
        self._benefits = None

    def reprice(self, slot: int, cost: float) -> None:
        """Set the cost of the storage in `slot`."""
        self._cost[slot] = cost
        if self._benefits is not None:
            self._benefits[slot] = self._benefit_of(slot, self._now)

    def best(self, now: Nanoseconds) -> int:
        """Return the slot with the greatest benefit at the time `now`. There must be one.

        Of equal benefits, the greatest order wins.
        """
        used = slice(0, self._used)
        benefits = self._benefits
        if benefits is None or now != self._now:
            self._now = now
            self._benefits = benefits = self._benefit_of(used, now)
        best = int(benefits.argmax())
        ties = (benefits == benefits[best]).nonzero()[0]
        return best if len(ties) == 1 else int(ties[self._order[ties].argmax()])

    def _benefit_of(self, slots: Any, now: Nanoseconds) -> Any:
        """Return the benefits at `now` of the storages in `slots`.

        One product and one quotient are rounded, in that order. So storages with equal scores have
        equal benefits.
        """
        nbytes, cost = self._bytes[slots], self._cost[slots]
        return nbytes * (now - self._last[slots]) / cost if self._moving else nbytes / cost
