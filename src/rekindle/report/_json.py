"""Write reports as JSON, and read such JSON.

The JSON contains a version number. `read` accepts only the version and the fields that `write`
writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from rekindle._errors import InvalidFile
from rekindle.report._data import Choice, Figures, Holders, Moved, Recomputed, Swapped, Timeline

VERSION = 1


def write(report: Figures) -> str:
    """Return one JSON object with "format", "version" and the fields of the report."""
    head = {"format": "rekindle report", "version": VERSION}
    return json.dumps(head | asdict(report), indent=1)


def read(text: str) -> dict[str, Any]:
    """Return the fields of a report.

    Args:
        text: The JSON.

    Raises:
        InvalidFile: `write` did not write this text.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidFile(1, "", "a Rekindle report as JSON", _what_it_is(text)) from None
    if not isinstance(data, dict) or data.get("format") != "rekindle report":  # pyright: ignore[reportUnknownMemberType]
        raise InvalidFile(1, "format", '"rekindle report"', _what_it_is(text))
    found = cast("dict[str, Any]", data)
    if found.get("version") != VERSION:
        raise InvalidFile(1, "version", str(VERSION), repr(found.get("version")))
    for name in ("peak", "compute_ns", "recompute_ns", "evictions", "recomputations"):
        if type(found.get(name)) is not int:
            raise InvalidFile(1, name, "a whole number", repr(found.get(name)))
    try:
        fields = {name: value for name, value in found.items() if name not in _HEAD}
        fields = {name: _PARTS.get(name, _as_is)(value) for name, value in fields.items()}
        Figures(**fields)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InvalidFile(
            1, "", "a JSON object with the fields of a Rekindle report", str(error)
        ) from None
    return fields


def _what_it_is(text: str) -> str:
    first = text.partition("\n")[0]
    if '"rekindle": "trace"' in first:
        return "a trace, which `rekindle simulate` and `rekindle plan` read"
    return repr(text[:40])


_HEAD = ("format", "version")
_PARTS: dict[str, Callable[[Any], Any]] = {
    "at_peak": lambda value: Holders(**value),
    "timeline": lambda value: Timeline(
        tuple(value["clock"]),
        {name: tuple(band) for name, band in value["bands"].items()},
        tuple(value["evicted"]),
        tuple(value["recomputed"]),
        value.get("note", ""),
    ),
    "recomputed": lambda value: tuple(Recomputed(**row) for row in value),
    "choices": lambda value: tuple(
        Choice(**row | {"sliced": tuple(row.get("sliced", ()))}) for row in value
    ),
    "swapped": lambda value: None if value is None else Swapped(**value),
    "moved": lambda value: tuple(Moved(**row) for row in value),
    "advice": tuple,
}


def _as_is(value: Any) -> Any:
    return value
