"""How fast a store is, each way: measured once for each place in this process, then watched."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Final, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.swap._store import Bandwidth, Lost, Store

_ROUNDS = 3
_NONE = Bandwidth(1, 1)
"""Of what does not work at all: nothing is worth a transfer."""

WATCHED: Final = 4
"""Transfers in a row by whose sum a way is judged: one alone may have had to wait for anything."""
MUCH_SLOWER: Final = 4
"""A way is believed to have become slower from this factor on: other programs use it, too."""

_known: dict[Hashable, Bandwidth] = {}


@final
class Pace:
    """How fast the transfers one way were lately, beside what is believed of it."""

    def __init__(self, believed: Bytes, latency_ns: Nanoseconds) -> None:
        """`latency_ns` is taken off each: small values are judged as the probe was, a large one."""
        self._believed = believed  # bytes in a second
        self._latency_ns = latency_ns
        self._last: deque[tuple[Bytes, Nanoseconds]] = deque(maxlen=WATCHED)

    def slower(self, nbytes: Bytes, ns: Nanoseconds) -> Bytes | None:
        """A transfer of `nbytes` took `ns`. Bytes in a second, if that is news: much slower."""
        self._last.append((nbytes, max(0, ns - self._latency_ns)))
        moved, took = (sum(each) for each in zip(*self._last, strict=True))
        if len(self._last) < WATCHED or MUCH_SLOWER * moved * 10**9 >= self._believed * took:
            return None
        self._believed = max(1, moved * 10**9 // took)
        return self._believed


def bandwidth_of(store: Store, place: Hashable, most: Bytes) -> Bandwidth:
    """Bytes in a second, the median of three transfers of its probe, but of `most` bytes at most.

    `place`: what it depends on, such as the disk.
    """
    if place not in _known:
        try:
            _known[place] = _measured(store, max(1, min(store.probe, store.limit, most)))
        except Lost:
            return _NONE
    return _known[place]


def _measured(store: Store, nbytes: Bytes) -> Bandwidth:
    home = store.new_home(nbytes)
    out: list[float] = []
    back: list[float] = []
    for _ in range(_ROUNDS):
        begun = store.write(home)
        if begun is None:
            raise Lost("no room for a probe")
        key, way = begun
        try:
            way.wait()
            out.append(home.nbytes() / max(way.ns, 1))
            way = store.read(key, home)
            way.wait()
            back.append(home.nbytes() / max(way.ns, 1))
        finally:
            store.release(key)
    median = _ROUNDS // 2
    return Bandwidth(int(1e9 * sorted(out)[median]), int(1e9 * sorted(back)[median]))
