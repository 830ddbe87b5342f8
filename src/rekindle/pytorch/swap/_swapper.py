"""Moves values to the host and back while the program computes.

The engine knows which storages are in memory, on the host, or both. What it does not know is time:

- A write goes on after `SwapOut` was performed. Until it has ended its memory is not free, though
  the engine takes it for gone: between events it counts as memory in no storage, and what needs
  the room waits.
- Reading begins before `SwapIn` is asked for, into room that the budget has left: last saved, first
  wanted. It counts likewise, and whoever needs the room gets it.
- What cannot be computed again is let go only when its copy is there.

So what is done depends on the engine alone, and only how long it takes depends on the machine; but
where the bandwidth was measured and not given, the engine hears if it falls.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch

from rekindle._types import Bytes
from rekindle.engine import Engine, Storage
from rekindle.pytorch.devices import accelerator, is_full
from rekindle.pytorch.swap._store import Bandwidth, Lost, Store, Transfer
from rekindle.pytorch.swap._transfers import Transfers
from rekindle.pytorch.tensors import Memory, Table, site

READS_AHEAD = 2
"""Begun before they are asked for, at once: one arrives while the one before is computed with."""


class _Moving(NamedTuple):
    """A write or a read that was begun, and the memory at its end."""

    home: torch.UntypedStorage
    way: Transfer


@final
class Swapper:
    """The copies on the host for one engine, and what is on its way there and back."""

    def __init__(
        self, engine: Engine, table: Table, store: Store, believed: Bandwidth | None
    ) -> None:
        """The engine hears when a way becomes much slower than `believed`; None: it is not told."""
        self.store = store
        assert engine.host is not None
        self.transfers = Transfers(store, believed, engine.host.measured)
        self._engine = engine
        self._table = table
        self._keys: dict[Storage, object] = {}  # of copies that are there, or on their way
        self._leaving: dict[Storage, _Moving] = {}  # the oldest first
        self._coming: dict[Storage, _Moving] = {}
        self._away: list[Storage] = []  # on the host alone, by id
        self._wanted: Storage | None = None  # what came back last
        self._amid = False  # an event is being acted on
        self._counted: Bytes = 0  # by the engine for us, between events

    # -- time -----------------------------------------------------------------------------------

    @contextmanager
    def event(self) -> Iterator[None]:
        """Inside, the engine decides as if every transfer were over. Events do not nest: an inner
        one is part of the outer."""
        if self._amid:
            yield
            return
        self._amid = True
        self._count(0)
        try:
            yield
            self._read_ahead()
        finally:
            self._amid = False
            self._count(self._in_flight())
        self.transfers.complain()

    def has_room(self, nbytes: Bytes) -> bool:
        """Whether the room that the engine has for `nbytes` more is there; waits for it, first."""
        self.wait_for(nbytes)
        return self._engine.memory + nbytes <= self._engine.budget

    def wait_for(self, nbytes: Bytes) -> None:
        """Until `nbytes` more fit, or nothing is under way: gives up what was read ahead first."""
        while self._leaving and next(iter(self._leaving.values())).way.ended():
            self._arrive(next(iter(self._leaving)))
        most = self._engine.budget - (self._engine.memory - self._counted) - nbytes
        while self._coming and self._in_flight() > most:
            self._give_up(next(reversed(self._coming)))
        while self._leaving and self._in_flight() > most:
            self._arrive(next(iter(self._leaving)))
        if not self._amid:
            self._count(self._in_flight())

    def wait_for_all(self) -> None:
        """Until nothing is under way."""
        while self._coming:
            self._give_up(next(reversed(self._coming)))
        while self._leaving:
            self._arrive(next(iter(self._leaving)))

    def _in_flight(self) -> Bytes:
        """Bytes in memory that the engine takes for gone, or for not there yet."""
        leaving = sum(storage.nbytes for storage in self._leaving if not storage.resident)
        return leaving + sum(storage.nbytes for storage in self._coming)

    def _count(self, nbytes: Bytes) -> None:
        self._engine.account(0, nbytes - self._counted)
        self._counted = nbytes

    # -- out ------------------------------------------------------------------------------------

    def begin(self, storage: Storage) -> bool:
        """Begins to copy the resident `storage` to the host. False: it cannot be, or was not.

        What cannot be computed again is there when this returns.
        """
        memory: Memory = storage.payload
        home = memory.home()
        begun = self.store.write(home) if home.nbytes() == memory.size else None
        if begun is None:
            return False
        self._keys[storage], way = begun
        self._leaving[storage] = _Moving(home, way)
        return storage.replayable or self._ended(storage)

    def is_leaving(self, storage: Storage) -> bool:
        """Whether a copy of `storage` is under way."""
        return storage in self._leaving

    def gone(self, storage: Storage) -> None:
        """The memory of `storage` was let go. If it has a copy it can come back."""
        if storage in self._leaving and not self._amid:
            self._count(self._in_flight())
        if storage in self._keys and not self._is_away(storage):
            insort(self._away, storage, key=_id)

    def settle(self, storage: Storage) -> None:
        """Somebody may write where `storage` is: its copy is made first."""
        if storage in self._leaving:
            self._arrive(storage)

    def _arrive(self, storage: Storage) -> None:
        """Waits for the write of `storage`, which the engine takes for done."""
        home = self._leaving[storage].home
        if not self._ended(storage):
            self._not_written(storage, home)

    def _not_written(self, storage: Storage, home: torch.UntypedStorage) -> None:
        """There is no copy of what is still in `home`."""
        gone = storage.on_host and not storage.resident
        if gone and not storage.replayable:  # its recipe was lost meanwhile: it stays after all
            self._engine.swap_out_failed(storage)
            self.hang(storage, home)
        else:
            self._engine.copy_lost(storage)

    def _ended(self, storage: Storage) -> bool:
        """Waits for the write of `storage`; whether the copy is good."""
        moving = self._leaving.pop(storage)
        try:
            self.transfers.wait(moving.way, moving.home.nbytes(), out=True)
        except Lost as lost:
            self._forget(storage, f"written: {lost}")
            return False
        return True

    # -- back -----------------------------------------------------------------------------------

    def fetch(self, storage: Storage) -> torch.UntypedStorage | None:
        """The content of `storage` in memory, for which there is room; None: it has no copy."""
        self._leave_away(storage)
        self._wanted = storage
        leaving = self._leaving.get(storage)
        if leaving is not None:  # it is still here
            if self._ended(storage):
                return leaving.home
            self._not_written(storage, leaving.home)
            return None
        try:
            if storage not in self._coming:
                self.wait_for(storage.nbytes)
                self._read_now(storage)
            moving = self._coming.pop(storage)
            self.transfers.wait(moving.way, moving.home.nbytes(), out=False)
        except Lost as lost:
            self._forget(storage, f"read back: {lost}")
            return None
        return moving.home

    def hang(self, storage: Storage, home: torch.UntypedStorage) -> None:
        """`storage` is in `home` from now on."""
        memory: Memory = storage.payload
        memory.owned = home
        memory.origin = None
        if memory.witness is None:
            memory.version = 0
        self._table.settle(storage, home, home._cdata)

    def returned(self, storage: Storage) -> None:
        """`storage` was computed again, although there is a copy."""
        self._leave_away(storage)
        self.settle(storage)
        if storage in self._coming:
            self._give_up(storage)

    def discard(self, storage: Storage) -> None:
        """Nobody needs the copy of `storage` any more."""
        self.returned(storage)
        if storage in self._keys:  # else it never arrived
            self.store.release(self._keys.pop(storage))

    def _read(self, storage: Storage) -> None:
        home = self.store.new_home(storage.payload.size)
        self._coming[storage] = _Moving(home, self.store.read(self._keys[storage], home))

    def _read_now(self, storage: Storage) -> None:
        """With all the memory that is on its way, if the device has no more."""
        try:
            self._read(storage)
        except RuntimeError as error:
            if not is_full(error):
                raise
            self.wait_for_all()
            if accelerator.in_use():
                accelerator.empty_cache()
            self._read(storage)

    def _read_ahead(self) -> None:
        """Begins to read what was saved before what came back last. Half of the room is left to
        the operators that come first."""
        if self._wanted is None:
            return
        index = bisect_left(self._away, self._wanted.id, key=_id)
        self._wanted = None
        while index > 0 and len(self._coming) < READS_AHEAD:
            index -= 1
            storage = self._away[index]
            if not storage.references or storage in self._coming or storage in self._leaving:
                continue
            if 2 * storage.nbytes > self._engine.budget - self._engine.memory - self._in_flight():
                return
            try:
                self._read(storage)
            except Lost:  # who asks for it will be told
                return
            except RuntimeError as error:
                if not is_full(error):
                    raise
                return  # it was to come early, not to displace anything

    def _give_up(self, storage: Storage) -> None:
        """What was read ahead makes room: it will be read again."""
        moving = self._coming.pop(storage)
        try:
            self.transfers.wait(moving.way, moving.home.nbytes(), out=False)
        except Lost:  # likewise
            return

    def _is_away(self, storage: Storage) -> bool:
        index = bisect_left(self._away, storage.id, key=_id)
        return index < len(self._away) and self._away[index] is storage

    def _leave_away(self, storage: Storage) -> None:
        if self._is_away(storage):
            del self._away[bisect_left(self._away, storage.id, key=_id)]

    # -- what goes wrong ------------------------------------------------------------------------

    def _forget(self, storage: Storage, why: str) -> None:
        """The copy of `storage` is not there."""
        self._leave_away(storage)
        self.store.release(self._keys.pop(storage))
        self.transfers.failed(storage.nbytes, site(storage), why)


def _id(storage: Storage) -> int:
    return storage.id
