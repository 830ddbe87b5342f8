"""The interface of the swap transfers that drivers and reports use."""

from __future__ import annotations

from typing import Protocol

from rekindle._errors import OutOfBudget, SwapFailed
from rekindle._types import Nanoseconds


class TransfersOnHost(Protocol):
    """Statistics of finished swap transfers, and errors of failed ones."""

    @property
    def transfer_ns(self) -> Nanoseconds:
        """Total duration (ns) of the transfers."""
        ...

    @property
    def waiting_ns(self) -> Nanoseconds:
        """Time (ns) that the program waited for transfers."""
        ...

    def add_note_to(self, out: OutOfBudget) -> None:
        """Add a note about failed transfers to the error `out`, which they may have caused."""
        ...

    def lost(self, site: str) -> SwapFailed:
        """Return the error for a value without a recipe whose host copy cannot be read.

        Args:
            site: The operator that made the value, and its line.
        """
        ...
