"""The interface of stores, which hold the bytes of swapped-out values.

A store moves bytes while the program computes. `write` and `read` start a transfer and return at
once. Until the transfer has ended, the memory at its end belongs to it. A failure raises `Lost`
from `Transfer.wait`. After a failed write the memory is unchanged, and after a failed read it is
undefined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch

from rekindle._types import Bytes, Nanoseconds


class Lost(Exception):
    """A transfer failed, and the message says why. Never leaves this library."""


@final
@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second in each direction."""

    out: Bytes
    back: Bytes


class Transfer(ABC):
    """A transfer that was started."""

    @abstractmethod
    def ended(self) -> bool:
        """Return True if the transfer has ended or failed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the bytes have arrived and the memory belongs to the caller again.

        On a device, later work there waits instead of the host.

        Raises:
            Lost: The transfer failed.
        """

    @property
    @abstractmethod
    def ns(self) -> Nanoseconds:
        """Duration (ns) of the ended transfer; 0 if it failed."""

    @property
    @abstractmethod
    def waiting_ns(self) -> Nanoseconds:
        """Time (ns) that the program waited for the ended transfer: the part not hidden."""


class Store(ABC):
    """A place for at most `limit` bytes of values that are not in memory."""

    limit: Bytes
    #: Bytes to transfer when the bandwidth is measured. Fewer would measure the latency.
    probe: Bytes = 2 * 1024**2
    #: Time of a transfer that does not depend on its size. Here 5 ms, twice, until Python lets the
    #: other thread run.
    latency_ns: Nanoseconds = 10_000_000

    @property
    @abstractmethod
    def used(self) -> Bytes:
        """Bytes in use."""

    @abstractmethod
    def write(self, home: torch.UntypedStorage) -> tuple[object, Transfer] | None:
        """Start to copy the contents of `home` into the store.

        Returns:
            A key for `read`, and the transfer. None if there is no room.
        """

    @abstractmethod
    def read(self, key: object, home: torch.UntypedStorage) -> Transfer:
        """Start to copy the bytes of `key` into `home`, which has the same size."""

    @abstractmethod
    def release(self, key: object) -> None:
        """Free the bytes of `key`, which has no running transfer."""

    @abstractmethod
    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        """Allocate memory for a value that returns."""

    @abstractmethod
    def close(self) -> None:
        """End running transfers, and free everything."""
