"""Read JSON objects line by line, with checked fields.

Every error is an `InvalidFile` that names the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, cast, final

from rekindle._errors import InvalidFile

_SHOWN = 40  # most characters of a wrong value to quote in an error message


@final
class Line:
    """JSON object on one line of a file. Each method returns a field and checks its type.

    A method raises `InvalidFile` if the field is missing or has another type.
    """

    __slots__ = ("fields", "number")

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        try:
            fields: Any = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidFile(number, "", "one JSON object", shown(text)) from None
        if not isinstance(fields, dict):
            raise InvalidFile(number, "", "one JSON object", shown(fields))
        self.fields = cast("dict[str, Any]", fields)

    def text(self, field: str) -> str:
        value = self._get(field, "text")
        if not isinstance(value, str):
            raise self.wrong(field, "text", value)
        return value

    def amount(self, field: str) -> int:
        """Return a field that must be a whole number and not negative."""
        return self.as_amount(field, self._get(field, "a whole number"))

    def flag(self, field: str) -> bool:
        """Return a field that must be true or false; False if the field is missing."""
        value = self.fields.get(field, False)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false", value)
        return value

    def items(self, field: str, *, optional: bool = False) -> list[Any]:
        if optional and field not in self.fields:
            return []
        value = self._get(field, "a list")
        if not isinstance(value, list):
            raise self.wrong(field, "a list", value)
        return cast("list[Any]", value)

    def amounts(self, field: str, *, optional: bool = False) -> list[int]:
        return [self.as_amount(field, item) for item in self.items(field, optional=optional)]

    def as_amount(self, field: str, value: object) -> int:
        if type(value) is not int or value < 0:
            raise self.wrong(field, "a whole number, not negative", value)
        return value

    def wrong(self, field: str, expected: str, got: object) -> InvalidFile:
        return InvalidFile(self.number, field, expected, shown(got))

    def _get(self, field: str, expected: str) -> object:
        if field not in self.fields:
            raise InvalidFile(self.number, field, expected, "nothing: the field is missing")
        return self.fields[field]


def read_lines(texts: Iterable[str]) -> Iterator[Line]:
    """Yield the JSON object on each line of a file. Empty lines are skipped."""
    for number, text in enumerate(texts, 1):
        if text.strip():
            yield Line(number, text)


def shown(value: object) -> str:
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
