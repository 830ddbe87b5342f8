"""The interface of stores, which hold the bytes of swapped-out values.

A store copies bytes while the program computes. `write` and `read` start a transfer and return at
once. Until the transfer has ended, the caller must not use or free the copied storage. If a
transfer fails, `Transfer.wait` raises `Lost`. A failed write leaves the storage unchanged. A failed
read leaves undefined contents in the storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch

from rekindle._types import Bytes, Nanoseconds


class Lost(Exception):
    """A swap transfer failed, for the reason in the message. User code never gets this error."""


@final
@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidths of a store in bytes per second: of swap-outs (`out`) and of swap-ins (`back`)."""

    out: Bytes
    back: Bytes


class Transfer(ABC):
    """A running or ended copy of one storage, to or from the store."""

    @abstractmethod
    def ended(self) -> bool:
        """Return True if the transfer has ended or has failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the transfer has ended, so that the caller may use the storage again.

        With CUDA, later work on the device waits for the transfer, and this method returns at once.

        Raises:
            Lost: The transfer failed.
        """

    @property
    @abstractmethod
    def ns(self) -> Nanoseconds:
        """Duration (ns) of the transfer, which must have ended; 0 if it failed."""

    @property
    @abstractmethod
    def waiting_ns(self) -> Nanoseconds:
        """Time (ns) that the program waited for the transfer, which must have ended."""


class Store(ABC):
    """A container in host memory or a file for at most `limit` bytes of swapped-out values."""

    limit: Bytes
    #: Bytes to copy in a test transfer. With fewer bytes, latency would dominate the time.
    probe: Bytes = 2 * 1024**2
    #: Time (ns) of a transfer that does not depend on its size. The default is twice 5 ms, after
    #: which Python switches to another thread.
    latency_ns: Nanoseconds = 10_000_000

    @property
    @abstractmethod
    def used(self) -> Bytes:
        """Bytes of the store that are in use."""

    @abstractmethod
    def write(self, home: torch.UntypedStorage) -> tuple[object, Transfer] | None:
        """Start to copy the contents of the storage `home` into the store.

        Returns:
            A key that identifies the copy for `read`, and the transfer. None if the store has no
            room.
        """

    @abstractmethod
    def read(self, key: object, home: torch.UntypedStorage) -> Transfer:
        """Start to copy the value with this `key` into the storage `home` of the same size."""

    @abstractmethod
    def release(self, key: object) -> None:
        """Free the stored value with this `key`, which must have no running transfer."""

    @abstractmethod
    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        """Allocate a storage on the budget's device for a value to be swapped in."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the running transfers, and free all stored values."""
