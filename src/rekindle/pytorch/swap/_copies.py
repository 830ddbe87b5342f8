"""The copies on the host of the native core: it says what to move, and knows what is where."""

from __future__ import annotations

from typing import final

import torch

from rekindle._types import Bytes, StorageId
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.swap._pinned_store import PinnedStore
from rekindle.pytorch.swap._store import Bandwidth, Lost, Store, Transfer
from rekindle.pytorch.swap._transfers import Transfers


@final
class Copies:
    """Called with the core's lock, from any thread: asks the core for nothing.

    The core keeps it as long as anybody may ask for what is there: it knows nothing of the core.
    """

    def __init__(self, store: Store, believed: Bandwidth | None) -> None:
        """`believed`: the bandwidth was measured, and is corrected if it falls."""
        self.store = store
        self.transfers = Transfers(store, believed, self._measured)
        self._keys: dict[StorageId, object] = {}
        self._ways: dict[StorageId, tuple[Transfer, Bytes, bool]] = {}  # bool: it goes out
        self._out_bytes_per_s = self._in_bytes_per_s = 0  # news, of which the core knows nothing

    def see(self, stream_id: int, device: int, kind: int) -> None:
        """The program uses that stream, which the core knows by its numbers."""
        assert isinstance(self.store, PinnedStore)
        self.store.streams.add(accelerator.stream(stream_id, device, kind))

    def write(self, number: StorageId, home: torch.UntypedStorage) -> bool:
        """Begins to copy what is in `home`, memory of the core, which stays as long as that does.

        Returns whether it did: there may be no room.
        """
        begun = self.store.write(home)
        if begun is None:
            return False
        self._keys[number], way = begun
        self._ways[number] = way, home.nbytes(), True
        return True

    def read(self, number: StorageId, home: torch.UntypedStorage) -> str:
        """Begins to copy it back. Returns why it could not."""
        try:
            way = self.store.read(self._keys[number], home)
            self._ways[number] = way, home.nbytes(), False
        except Lost as lost:
            return str(lost) or "no reason is known"
        return ""

    def ended(self, number: StorageId) -> bool:
        """Whether what is under way has arrived, or never will."""
        return self._ways[number][0].ended()

    def wait(self, number: StorageId) -> tuple[str, int, int]:
        """Until it has. Returns why it failed; bytes in a second, out and in, if they are news."""
        way, nbytes, out = self._ways.pop(number)
        why = ""
        try:
            self.transfers.wait(way, nbytes, out=out)
        except Lost as lost:
            why = str(lost) or "no reason is known"
        news = why, self._out_bytes_per_s, self._in_bytes_per_s
        self._out_bytes_per_s = self._in_bytes_per_s = 0
        return news

    def release(self, number: StorageId) -> None:
        """The copy is not needed any more, and nothing of it is under way."""
        self.store.release(self._keys.pop(number))

    def complain_of(self, nbytes: Bytes, site: str, why: str) -> None:
        """What an operator made could not be copied."""
        self.transfers.failed(nbytes, site, why)

    def complain(self) -> None:
        """Warns of what went wrong first, once; without the core's lock."""
        self.transfers.complain()

    def _measured(
        self, *, out_bytes_per_s: int | None = None, in_bytes_per_s: int | None = None
    ) -> None:
        self._out_bytes_per_s = out_bytes_per_s or self._out_bytes_per_s
        self._in_bytes_per_s = in_bytes_per_s or self._in_bytes_per_s
