"""Convert amounts of bytes and times from and to text.

No other module formats a quantity. Inside the library quantities are integers: bytes and ns.
"""

from __future__ import annotations

import math
import operator
import re
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from numbers import Real
from reprlib import repr as short_repr
from typing import SupportsIndex

from rekindle._errors import InvalidBudget
from rekindle._types import Bytes, Nanoseconds

# Bytes of each unit that a user may write. Keys are in lower case, because case is ignored.
_BYTES_IN = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(
    r"(?P<sign>[+-]?)(?P<number>\d+(?:_\d+)*(?:\.\d+)?)\s*(?P<unit>[^\d\s].*)?", re.ASCII
)
_SCIENTIFIC = re.compile(r"\d+(?:\.\d+)?[eE]\+?\d{1,3}", re.ASCII)
# The largest amount: the largest signed 64-bit integer, because PyTorch's sizes are such integers.
_MOST = 2**63 - 1
# Longest accepted text, in characters: more than any size needs. Longer text could reach the limit
# of int(), which refuses more than 4,300 digits.
_LONGEST = 40

# Unit, its size in bytes, number of decimals. Each unit has a fixed number of decimals, so that the
# columns of a table line up.
_SHOWN_BYTES = (
    ("B", 1, 0),
    ("KiB", 1024, 1),
    ("MiB", 1024**2, 1),
    ("GiB", 1024**3, 2),
    ("TiB", 1024**4, 2),
)
_SHOWN_NS = (("ns", 1, 0), ("us", 10**3, 1), ("ms", 10**6, 1), ("s", 10**9, 2))

_ANY_UNIT = "B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"

#: Bytes. A smaller number without a unit is refused: the user probably forgot the unit.
_LEAST_WITHOUT_UNIT = 100


def parse_bytes(value: str | int, *, line: str = "rekindle.budget({})") -> Bytes:
    """Read a positive amount of bytes from an int or text.

    Args:
        value: An int, or text such as "6GiB", "1.5 gb", "200_000_000", "64 KiB".
        line: The user's source line, with {} for the size. The error message shows it corrected.

    Returns:
        The bytes, rounded down, so that a budget is never larger than the user wrote.

    Raises:
        InvalidBudget: `value` is not a positive amount; the message shows the corrected line.
    """
    return _Reader(value, line).read()


def parse_memory(value: str | int, *, line: str) -> Bytes:
    """Read an amount of memory as `parse_bytes` does, but refuse a small number without a unit.

    Nobody means a budget of 24 bytes by `rekindle.budget(24)`.

    Raises:
        InvalidBudget: `value` is not a positive amount, or a small number without a unit.
    """
    found, text = parse_bytes(value, line=line), str(value).strip()
    if text.isdecimal() and int(text) < _LEAST_WITHOUT_UNIT:
        shown = f'"{text}"' if isinstance(value, str) else text
        meant, as_bytes = line.format(f'"{text}GiB"'), line.format(f'"{text}B"')
        raise InvalidBudget(
            f"{line.format(shown)}: got {text} bytes, wanted a unit for so small a number; "
            f"write {meant}, or {as_bytes} if you mean bytes"
        )
    return found


def format_bytes(n: Bytes) -> str:
    """Format bytes for people: "0 B", "312.0 MiB", "1.50 GiB"."""
    return _scaled(n, _SHOWN_BYTES)


def format_at_least(n: Bytes) -> str:
    """Format bytes as `format_bytes` does, but rounded up, so that the text is no less than `n`."""
    text = format_bytes(n)
    if n <= 0 or parse_bytes(text) >= n:
        return text
    number, unit = text.split()
    decimals = len(number.partition(".")[2])
    return f"{float(number) + 10**-decimals:.{decimals}f} {unit}"


def format_ns(ns: Nanoseconds) -> str:
    """Format ns for people: "850 ns", "3.2 ms", "12.50 s", "2 min 05 s", "1 h 02 min"."""
    if abs(ns) < 59_995_000_000:  # From this time on, rounding would give "60.00 s".
        return _scaled(ns, _SHOWN_NS)
    sign = "-" if ns < 0 else ""
    minutes, seconds = divmod(round(abs(ns) / 1e9), 60)
    if minutes < 60:
        return f"{sign}{minutes} min {seconds:02} s"
    hours, minutes = divmod(round(abs(ns) / 60e9), 60)
    return f"{sign}{hours} h {minutes:02} min"


def _scaled(n: int, units: tuple[tuple[str, int, int], ...]) -> str:
    """Format `n` in the largest unit in which it is at least 1, or else in the smallest unit."""
    for (unit, size, decimals), (_, next_size, _) in pairwise(units):
        shown = f"{n / size:.{decimals}f}"
        # Compare the rounded figure, so that 1,048,575 bytes do not show as "1024.0 KiB".
        if abs(float(shown)) * size < next_size:
            return f"{shown} {unit}"
    unit, size, decimals = units[-1]
    return f"{n / size:.{decimals}f} {unit}"


class _Reader:
    """Reader of one amount of bytes; keeps the user's value and source line for error messages."""

    def __init__(self, value: object, line: str) -> None:
        self.value = value
        self.line = line

    def read(self) -> Bytes:
        value = self.value
        if isinstance(value, str):
            return self._text(value.strip())
        if isinstance(value, bool):
            raise self._refused("a bool", "an int or text", '"6GiB"')
        if isinstance(value, float):
            raise self._refused("a float", "an int or text", *_instead_of(value))
        if isinstance(value, SupportsIndex):  # an int, or an integer of NumPy
            with suppress(TypeError):  # Most NumPy arrays also have `__index__`, but it raises.
                return self._positive(operator.index(value))
        if isinstance(value, Real):  # a float of NumPy, for example
            kind = type(value).__name__
            raise self._refused(f"a {kind}", "an int or text", *_instead_of(float(value)))
        raise self._refused(f"an object of type {type(value).__name__}", "an int or text", '"6GiB"')

    def _text(self, text: str) -> Bytes:
        match = _SIZE.fullmatch(text[:_LONGEST])
        if match is None:
            got = "text that does not start with a number" if text else "empty text"
            raise self._refused(got, f"a number and a unit: {_ANY_UNIT}", '"6GiB"')
        if len(text) > _LONGEST:
            raise self._refused(
                f"{len(text)} characters", f"at most {_LONGEST} characters", '"6GiB"'
            )
        number, unit = match["number"], match["unit"] or "B"
        if match["unit"] is None and "." in number:
            in_gib = _amount(number, "B") and _is_size(number, "GiB")
            instead = f'"{number}GiB"' if in_gib else '"6GiB"'
            raise self._refused("a fraction and no unit", f"a unit: {_ANY_UNIT}", instead)
        if _SCIENTIFIC.fullmatch(text):
            wanted = "an int, or a number and a unit"
            raise self._refused("a number with an exponent", wanted, *_instead_of(float(text)))
        if unit.lower() not in _BYTES_IN:
            raise self._unknown_unit(number, unit)
        n = _amount(number, unit)
        if n > 0 and match["sign"] == "-":
            instead = text[1:].strip() if match["unit"] and n <= _MOST else "6GiB"
            raise self._refused("a negative size", "more than 0 bytes", f'"{instead}"')
        return self._positive(n)

    def _positive(self, n: int) -> Bytes:
        if n > _MOST:
            raise self._refused("2**63 bytes or more", "less than 2**63 bytes (8 EiB)", '"6GiB"')
        if n > 0:
            return n
        got = "a negative size" if n < 0 else "0 bytes"
        raise self._refused(got, "more than 0 bytes", '"6GiB"')

    def _unknown_unit(self, number: str, unit: str) -> InvalidBudget:
        if unit == "%":
            wanted = f"an amount of bytes: {_ANY_UNIT}"
            refused = self._refused("a share", wanted, '"6GiB"')
            return InvalidBudget(
                f"{refused}. To find the memory peak for a share: rekindle run --profile train.py"
            )
        letter = unit[0].upper()
        sizes = letter in "KMGT" and all(_is_size(number, letter + rest) for rest in ("B", "iB"))
        if not sizes:
            return self._refused(f"the unknown unit {unit!r}", _ANY_UNIT, '"6GiB"')
        binary, decimal = f"{letter}iB", f"{letter}B"
        if len(unit) > 1:
            return self._refused(f"the unknown unit {unit!r}", _ANY_UNIT, f'"{number}{binary}"')
        return self._refused(
            f"the unit {unit!r}, which has two meanings",
            " or ".join(f"{u} ({_amount(number, u)} bytes)" for u in (binary, decimal)),
            f'"{number}{binary}"',
            f'"{number}{decimal}"',
        )

    def _refused(self, got: str, wanted: str, *write: str) -> InvalidBudget:
        lines = " or ".join(self.line.format(instead) for instead in write)
        try:
            shown = short_repr(self.value)
        except ValueError:  # Python formats no int of more than 4,300 digits.
            shown = "..."
        return InvalidBudget(
            f"{self.line.format(shown)}: got {got}, wanted {wanted}; write {lines}"
        )


def _amount(number: str, unit: str) -> Bytes:
    """Return the bytes of `number` times `unit`, computed exactly and then rounded down."""
    return math.floor(Fraction(number) * _BYTES_IN[unit.lower()])


def _is_size(number: str, unit: str) -> bool:
    """Return True if `number` and `unit` make a valid amount of bytes."""
    return 0 < _amount(number, unit) <= _MOST


def _instead_of(value: float) -> tuple[str, ...]:
    """Return texts to suggest instead of a float: whole bytes, and a round size of equal value."""
    if not 1 <= value <= _MOST:  # also if it is not a number
        # Any example will do: a float below 1 may mean a share, and no size is near it.
        return ('"6GiB"',)
    if value < 1000:  # Such a small number hardly means bytes.
        return (f'"{Decimal(value):.4g}GiB"',)
    n = int(value)
    for letter, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("K", 10**3)):
        figure = f"{Decimal(n) / size:f}"
        if n >= size and len(figure) <= 5:
            return str(n), f'"{figure}{letter}B"'
    return (str(n),)
