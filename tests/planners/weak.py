"""The least time of any schedule of a chain, to test `rekindle.planners.rotor.persistent`.

Schedules here are weakly persistent: a checkpoint may be freed before its backward step, and a
later checkpoint takes its place (Beaumont et al., TOMS 2024). This finds the best of all schedules
of the chain model, in O(L^5 M) time.
"""

from __future__ import annotations

import numpy as np

from rekindle.planners import Chain
from rekindle.planners.rotor import Row, Table, _exact_unit


def weakly_persistent(chain: Chain, limit: int) -> float:
    """Return the least time of any schedule of the chain within `limit`; infinite if none fits."""
    unit = _exact_unit(chain)
    return _Weak(chain.in_units(unit), limit // unit).time


class _Weak:
    """Table of V(s, t, l, m), s <= t: the least time to reverse stages t..l from checkpoint x_s.

    The memory m excludes x_s. Each V is the best of three moves:

    - if s = t, stage s runs forward and saves what its backward step needs (a tape);
    - x_s' becomes a new checkpoint, and the stages from t' on are reversed first;
    - x_r with s < r <= t replaces x_s as the checkpoint (a slide).

    The input x_0 belongs to the caller and is never freed. The case s = t = l is the base of the
    recurrence.
    """

    def __init__(self, chain: Chain, limit: int) -> None:
        self.chain = chain
        self.table = Table(chain, -1)
        self.room = limit - chain.value[0]
        self.rows: dict[tuple[int, int, int], Row] = {}

    @property
    def time(self) -> float:
        if self.room < 0:
            return float("inf")
        last = len(self.chain)
        for length in range(last + 1):
            for t in range(last - length, -1, -1):
                for s in range(t, -1, -1):
                    self.rows[s, t, t + length] = self._row(s, t, t + length)
        return float(self.rows[0, 0, last][self.room])

    def _row(self, s: int, t: int, l: int) -> Row:  # noqa: E741
        """Compute V(s, t, l, m), the least time, for every amount of memory m."""
        chain, forward = self.chain, self.table.forward
        row = np.full(self.room + 1, np.inf)
        if s == t:
            need = self.table.all_needs(s, l)
            if s == l:
                row[need:] = self.table.once(s)
            else:
                taped = self._shifted((s + 1, s + 1, l), chain.tape[s])
                row[need:] = taped[need:] + self.table.once(s)
        for following in range(t + 1, l + 1):
            left = self.rows[s, t, following - 1]
            for kept in range(s + 1, following + 1):
                need = self._forward_needs(s, kept, l, slide=False)
                right = self._shifted((kept, following, l), chain.value[kept])
                time = forward[kept] - forward[s] + right + left
                row[need:] = np.minimum(row[need:], time[need:])
        returned = chain.value[s] if s else 0
        for kept in range(s + 1, t + 1):
            need = self._forward_needs(s, kept, l, slide=True)
            slid = self._shifted((kept, t, l), chain.value[kept] - returned)
            time = forward[kept] - forward[s] + slid
            row[need:] = np.minimum(row[need:], time[need:])
        return row

    def _forward_needs(self, s: int, kept: int, l: int, *, slide: bool) -> int:  # noqa: E741
        """Return the least m for the forwards s .. kept-1 while y_{l+1} is in memory."""
        chain = self.chain
        returned = chain.value[s] if slide and s else 0
        need = chain.value[s + 1] + chain.forward_extra[s]
        for j in range(s + 1, kept):
            together = chain.value[j] + chain.value[j + 1] + chain.forward_extra[j]
            need = max(need, together - returned)
        return self.table.gradient(l) + need

    def _shifted(self, key: tuple[int, int, int], by: int) -> Row:
        """Return the vector of V(key, m - by) over all m; beyond its end V has its last value."""
        sources = np.arange(self.room + 1) - by
        row = self.rows[key][np.clip(sources, 0, self.room)]
        return np.where(sources >= 0, row, np.inf)
