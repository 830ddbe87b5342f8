"""The interface of swapping, as drivers and reports see it."""

from __future__ import annotations

from typing import Protocol

from rekindle._errors import OutOfBudget, SwapFailed
from rekindle._types import Nanoseconds


class TransfersOnHost(Protocol):
    """Finished transfers, and errors of transfers."""

    @property
    def transfer_ns(self) -> Nanoseconds:
        """Time (ns) that transfers took."""
        ...

    @property
    def waiting_ns(self) -> Nanoseconds:
        """Time (ns) that the program waited for transfers."""
        ...

    def add_note_to(self, out: OutOfBudget) -> None:
        """Add a note about failed transfers to `out`, because they may be its cause."""
        ...

    def lost(self, site: str) -> SwapFailed:
        """Return the error to raise if a value lost its copy and cannot be recomputed."""
        ...
