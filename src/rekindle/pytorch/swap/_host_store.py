"""Keep track of the host copies of the values that the native core swaps out.

The core decides which values to copy, and calls `Copies`. `Copies` maps each copied storage to the
place of its copy in the store.
"""

from __future__ import annotations

from typing import final

import torch

from rekindle._interrupts import DeferredInterrupts
from rekindle._types import Bytes, StorageId
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.swap._pinned_store import PinnedStore
from rekindle.pytorch.swap._store import Bandwidth, Lost, Store, Transfer
from rekindle.pytorch.swap._transfers import Transfers


@final
class Copies:
    """The host copies of one `rekindle.budget`, by the id of the copied storage.

    The core calls these methods from any thread while it holds its lock, so they must not call the
    core. The core keeps this object alive while copies may be read.
    """

    def __init__(self, store: Store, believed: Bandwidth | None) -> None:
        """Wrap `store`.

        Args:
            store: The store that copies the bytes and holds the copies.
            believed: The measured bandwidth. If it falls later, the core gets the new one. None:
                the user gave the bandwidth, which is never corrected.
        """
        self.store = store
        self.transfers = Transfers(store, believed)
        self._interrupts = DeferredInterrupts()
        self._keys: dict[StorageId, object] = {}
        # storage -> its running transfer, the transfer's bytes, and True for a swap-out
        self._running: dict[StorageId, tuple[Transfer, Bytes, bool]] = {}

    def defer_interrupts(self) -> None:
        """From now on note Ctrl-C. The core calls this before any other method."""
        self._interrupts.begin()

    def admit_interrupts(self) -> bool:
        """Stop noting Ctrl-C. Return True if it came."""
        return self._interrupts.stop()

    def add_stream(self, stream_id: int, device: int, kind: int) -> None:
        """Record that the program uses a CUDA stream, which its three numbers identify."""
        assert isinstance(self.store, PinnedStore)
        self.store.streams.add(accelerator.stream(stream_id, device, kind))

    def write(self, number: StorageId, home: torch.UntypedStorage) -> bool:
        """Start to copy the storage `home`, whose id is `number`, to host memory.

        The core keeps `home` alive until the copy has ended.

        Returns:
            True if the copy was started, False if the host has no room.
        """
        begun = self.store.write(home)
        if begun is None:
            return False
        self._keys[number], transfer = begun
        self._running[number] = transfer, home.nbytes(), True
        return True

    def read(self, number: StorageId, home: torch.UntypedStorage) -> str:
        """Start to copy storage `number` from host memory back into the storage `home`.

        Returns:
            "" if the copy was started, else the reason why it failed.
        """
        try:
            transfer = self.store.read(self._keys[number], home)
            self._running[number] = transfer, home.nbytes(), False
        except Lost as lost:
            return str(lost) or "no reason is known"
        return ""

    def ended(self, number: StorageId) -> bool:
        """Return True if the transfer of storage `number` has ended or failed."""
        return self._running[number][0].ended()

    def wait(self, number: StorageId) -> tuple[str, int, int]:
        """Wait for the running transfer of storage `number`.

        Returns:
            Three values: "" or the reason why the transfer failed; the bandwidth of swap-outs; the
            bandwidth of swap-ins. A bandwidth (bytes per second) is 0 if it did not change.
        """
        transfer, nbytes, out = self._running.pop(number)
        why = ""
        try:
            self.transfers.wait(transfer, nbytes, out=out)
        except Lost as lost:
            why = str(lost) or "no reason is known"
        return why, *self.transfers.take_slower()

    def release(self, number: StorageId) -> None:
        """Free the host copy of storage `number`, which has no running transfer."""
        self.store.release(self._keys.pop(number))

    def complain_of(self, nbytes: Bytes, site: str, why: str) -> None:
        """Record that a value could not be swapped.

        Args:
            nbytes: The size of the value.
            site: The operator that made the value, and the source line of the operator's call.
            why: The reason for the failure.
        """
        self.transfers.failed(nbytes, site, why)

    def complain(self) -> None:
        """Warn once about the first failed transfer. The caller does not hold the core's lock."""
        self.transfers.complain()
