"""The amount of memory that a user gives to a budget, in bytes or as "auto"."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final, final

import torch

from rekindle._errors import InvalidBudget
from rekindle._types import Bytes
from rekindle._units import parse_bytes
from rekindle.pytorch.context._auto import available

#: Environment variable that sets the amount for `rekindle.budget("auto")` from outside the program.
CAP: Final = "REKINDLE_BUDGET"

#: Bytes. A smaller number without a unit is refused: the user probably forgot the unit.
_LEAST_WITHOUT_UNIT: Final = 100


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
        found = parse_bytes(written, line=line)
        _check_unit(written, line)
        return found


def _is_auto(written: object) -> bool:
    """Return True if `written` is "auto", in any case and with spaces around it."""
    return isinstance(written, str) and written.strip().lower() == "auto"


def _check_unit(written: str | Bytes, line: str) -> None:
    """Refuse a bare number that is too small to be meant as bytes: `rekindle.budget(24)`."""
    text = str(written).strip()
    if text.isdecimal() and int(text) < _LEAST_WITHOUT_UNIT:
        shown = f'"{text}"' if isinstance(written, str) else text
        meant, as_bytes = line.format(f'"{text}GiB"'), line.format(f'"{text}B"')
        raise InvalidBudget(
            f"{line.format(shown)}: got {text} bytes, wanted a unit for so small a number; "
            f"write {meant}, or {as_bytes} if you mean bytes"
        )
