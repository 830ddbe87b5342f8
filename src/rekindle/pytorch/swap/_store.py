"""Where values go that are swapped out: their bytes, on the way there, there, and on the way back.

A store moves bytes while the program computes. `write` and `read` begin and return at once; until a
transfer has ended, the memory at its end belongs to it. What fails raises `Lost` from
`Transfer.wait`: the memory is as it was before a write, and of no use after a read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch

from rekindle._types import Bytes, Nanoseconds


class Lost(Exception):
    """Bytes that did not arrive; the message says why. Never seen outside of this library."""


@final
@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes in a second, each way."""

    out: Bytes
    back: Bytes


class Transfer(ABC):
    """Bytes under way."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether they have arrived, or never will."""

    @abstractmethod
    def wait(self) -> None:
        """Until the bytes are there and the memory is the caller's again. Raises `Lost`.

        On a device it is what comes next there that waits.
        """

    @property
    @abstractmethod
    def ns(self) -> Nanoseconds:
        """How long the transfer took; 0 if it failed. Asked once it has ended."""

    @property
    @abstractmethod
    def waiting_ns(self) -> Nanoseconds:
        """How long the program waited for it: what was not hidden. Likewise."""


class Store(ABC):
    """Holds at most `limit` bytes of values that are not in memory."""

    limit: Bytes
    #: What a transfer has to move for its time to tell how fast the way is.
    probe: Bytes = 2 * 1024**2
    #: What a transfer takes beside its bytes tells nothing of them: 5 ms until Python lets the
    #: other thread go on, twice.
    latency_ns: Nanoseconds = 10_000_000

    @property
    @abstractmethod
    def used(self) -> Bytes:
        """Bytes of it that are taken."""

    @abstractmethod
    def write(self, home: torch.UntypedStorage) -> tuple[object, Transfer] | None:
        """Begins to copy what is in `home`: a key for `read`, and the way there. None: no room."""

    @abstractmethod
    def read(self, key: object, home: torch.UntypedStorage) -> Transfer:
        """Begins to copy what was written under `key` into `home`, of the same size."""

    @abstractmethod
    def release(self, key: object) -> None:
        """What is under `key`, of which no transfer is under way, is not needed any more."""

    @abstractmethod
    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        """Memory for what comes back."""

    @abstractmethod
    def close(self) -> None:
        """Ends what is under way, and gives back what it took of the machine."""
