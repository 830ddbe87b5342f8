"""Who moves values to the host and back, as drivers and reports see it."""

from __future__ import annotations

from typing import Protocol

from rekindle._errors import OutOfBudget, SwapFailed
from rekindle._types import Nanoseconds


class TransfersOnHost(Protocol):
    """The copies that are over, and what went wrong with them."""

    @property
    def transfer_ns(self) -> Nanoseconds:
        """Time that they took."""
        ...

    @property
    def waiting_ns(self) -> Nanoseconds:
        """Time that the program waited for them."""
        ...

    def add_note_to(self, out: OutOfBudget) -> None:
        """If something went wrong, that may be why."""
        ...

    def lost(self, site: str) -> SwapFailed:
        """What to raise where a value cannot be had again."""
        ...
