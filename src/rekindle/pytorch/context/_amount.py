"""The amount of memory that a user gives to a budget, in bytes or as "auto"."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, final

import torch

from rekindle._types import Bytes
from rekindle._units import parse_memory
from rekindle.pytorch.context._auto import available

#: Environment variable that sets the amount for `rekindle.budget("auto")` from outside the program.
CAP: Final = "REKINDLE_BUDGET"


@final
@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of memory as the user wrote it, checked. `on` returns it in bytes.

    Args:
        written: The amount as the user wrote it: bytes, text with a unit, or "auto".
        line: The user's source line, with {} for the amount, for error messages.

    Raises:
        InvalidBudget: `written` or the variable `REKINDLE_BUDGET`, which "auto" reads, is neither
            an amount of bytes nor "auto".
    """

    written: str | Bytes
    line: str = field(default="rekindle.budget({})", compare=False)

    def __post_init__(self) -> None:
        self._bytes()

    @property
    def is_measured(self) -> bool:
        """True for "auto" without `REKINDLE_BUDGET`: the amount depends on the device's memory."""
        return self._bytes() is None

    def on(self, device: torch.device, ranks: int | None = None) -> Bytes:
        """Return the amount in bytes. For "auto", measure the memory of `device`.

        Args:
            device: The device whose memory the amount limits.
            ranks: The number of processes that share the device; see `available`.
        """
        found = self._bytes()
        return available(device, ranks) if found is None else found

    def _bytes(self) -> Bytes | None:
        """Return the bytes that the user or `REKINDLE_BUDGET` names, or None to measure them."""
        written, line = self.written, self.line
        if _is_auto(written):
            written, line = os.environ.get(CAP, "").strip(), f"{CAP}={{}}"
            if not written or _is_auto(written):
                return None
        return parse_memory(written, line=line)


def _is_auto(written: object) -> bool:
    """Return True if `written` is "auto", in any case and with spaces around it."""
    return isinstance(written, str) and written.strip().lower() == "auto"
