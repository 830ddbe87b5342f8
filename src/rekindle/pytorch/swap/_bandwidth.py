"""Measure and monitor how fast a store copies swapped values out and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.swap._store import Bandwidth, Lost, Store

_ROUNDS = 3
_NONE = Bandwidth(1, 1)
"""The bandwidth reported for a store that does not work: so low that the engine never swaps."""

WATCHED: Final = 4
"""Number of latest transfers whose speed is averaged, because a single one may be delayed."""
MUCH_SLOWER: Final = 4
"""How many times slower transfers must be than before to count as slower.

Smaller differences mean little, because other programs use the same disk or bus.
"""

_known: dict[Hashable, Bandwidth] = {}


@final
class Pace:
    """Compares the speed of recent transfers in one direction with the bandwidth believed so far.

    One object compares swap-outs, another one swap-ins.
    """

    def __init__(self, believed: Bytes, latency_ns: Nanoseconds) -> None:
        """Start with the bandwidth that the engine uses so far.

        Args:
            believed: That bandwidth in bytes per second.
            latency_ns: Time (ns) to subtract from each transfer. It makes the bandwidth of small
                transfers comparable with the expected one, which large transfers measured.
        """
        self._believed = believed  # bytes per second
        self._latency_ns = latency_ns
        self._last: deque[tuple[Bytes, Nanoseconds]] = deque(maxlen=WATCHED)

    def slower(self, nbytes: Bytes, ns: Nanoseconds) -> Bytes | None:
        """Record that a transfer of `nbytes` took `ns`.

        Returns:
            The measured bandwidth if it is much lower than the bandwidth believed so far, else
            None. A returned bandwidth is the believed one from then on.
        """
        self._last.append((nbytes, max(0, ns - self._latency_ns)))
        moved, took = (sum(each) for each in zip(*self._last, strict=True))
        if len(self._last) < WATCHED or MUCH_SLOWER * moved * 10**9 >= self._believed * took:
            return None
        self._believed = max(1, moved * 10**9 // took)
        return self._believed


def bandwidth_of(store: Store, place: Hashable, most: Bytes) -> Bandwidth:
    """Return the bandwidth of `store`: the median of three test transfers in each direction.

    Args:
        store: The store.
        place: Identifies the hardware, such as the disk. Each place is measured once per process.
        most: The most bytes to copy in a test transfer.
    """
    if place not in _known:
        try:
            _known[place] = _measured(store, max(1, min(store.probe, store.limit, most)))
        except Lost:
            return _NONE
    return _known[place]


def _measured(store: Store, nbytes: Bytes) -> Bandwidth:
    """Measure the bandwidths of `store` by copying `nbytes` out and back a few times."""
    home = store.new_home(nbytes)
    out: list[float] = []
    back: list[float] = []
    for _ in range(_ROUNDS):
        begun = store.write(home)
        if begun is None:
            raise Lost("no room for a probe")
        key, transfer = begun
        try:
            transfer.wait()
            out.append(home.nbytes() / max(transfer.ns, 1))
            transfer = store.read(key, home)
            transfer.wait()
            back.append(home.nbytes() / max(transfer.ns, 1))
        finally:
            store.release(key)
    median = _ROUNDS // 2
    return Bandwidth(int(1e9 * sorted(out)[median]), int(1e9 * sorted(back)[median]))
