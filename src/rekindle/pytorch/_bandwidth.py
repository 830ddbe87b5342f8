"""How fast a store is, each way: measured once for each place in this process."""

from __future__ import annotations

from collections.abc import Hashable

from rekindle._types import Bytes
from rekindle.pytorch._store import Bandwidth, Lost, Store

PROBE: Bytes = 2 * 1024**2
_ROUNDS = 3
_NONE = Bandwidth(1, 1)
"""Of what does not work at all: nothing is worth a transfer."""

_known: dict[Hashable, Bandwidth] = {}


def bandwidth_of(store: Store, place: Hashable, most: Bytes) -> Bandwidth:
    """Bytes in a second, the median of three transfers of 2 MiB, but of `most` bytes at most.

    `place`: what it depends on, such as the disk.
    """
    if place not in _known:
        try:
            _known[place] = _measured(store, max(1, min(PROBE, store.limit, most)))
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
