"""The host copies of the native core's values.

The core decides what to copy, and calls this object. This object knows where each copy is.
"""

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
    """Copies by the id of their storage.

    The core calls it from any thread, with the core's lock, so it must not call the core. The core
    keeps it alive while copies may be read.
    """

    def __init__(self, store: Store, believed: Bandwidth | None) -> None:
        """Wrap `store`.

        Args:
            store: Moves the bytes.
            believed: The measured bandwidth, to be corrected if it falls. None: never correct it.
        """
        self.store = store
        self.transfers = Transfers(store, believed, self._measured)
        self._keys: dict[StorageId, object] = {}
        # The flag is True for a transfer out.
        self._ways: dict[StorageId, tuple[Transfer, Bytes, bool]] = {}
        # Measured bandwidths to report to the core.
        self._out_bytes_per_s = self._in_bytes_per_s = 0

    def see(self, stream_id: int, device: int, kind: int) -> None:
        """Note that the program uses a stream, which the core knows by its numbers."""
        assert isinstance(self.store, PinnedStore)
        self.store.streams.add(accelerator.stream(stream_id, device, kind))

    def write(self, number: StorageId, home: torch.UntypedStorage) -> bool:
        """Start a copy of `home`, memory that the core keeps alive meanwhile.

        Returns:
            True if it started, False if there is no room.
        """
        begun = self.store.write(home)
        if begun is None:
            return False
        self._keys[number], way = begun
        self._ways[number] = way, home.nbytes(), True
        return True

    def read(self, number: StorageId, home: torch.UntypedStorage) -> str:
        """Start to copy storage `number` back into `home`. Return why it failed, or ""."""
        try:
            way = self.store.read(self._keys[number], home)
            self._ways[number] = way, home.nbytes(), False
        except Lost as lost:
            return str(lost) or "no reason is known"
        return ""

    def ended(self, number: StorageId) -> bool:
        """Return True if the running transfer of storage `number` has ended, or failed."""
        return self._ways[number][0].ended()

    def wait(self, number: StorageId) -> tuple[str, int, int]:
        """Wait for the running transfer of storage `number`.

        Returns:
            Why it failed, or ""; and the bandwidths out and in (bytes per second) if they changed,
            else 0.
        """
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
        """Free the copy of storage `number`, which has no running transfer."""
        self.store.release(self._keys.pop(number))

    def complain_of(self, nbytes: Bytes, site: str, why: str) -> None:
        """Note that the result of an operator could not be copied."""
        self.transfers.failed(nbytes, site, why)

    def complain(self) -> None:
        """Warn once about the first failure. Called without the core's lock."""
        self.transfers.complain()

    def _measured(
        self, *, out_bytes_per_s: int | None = None, in_bytes_per_s: int | None = None
    ) -> None:
        """Store measured bandwidths until the next `wait` returns them."""
        self._out_bytes_per_s = out_bytes_per_s or self._out_bytes_per_s
        self._in_bytes_per_s = in_bytes_per_s or self._in_bytes_per_s
