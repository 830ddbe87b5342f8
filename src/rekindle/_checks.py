"""Arguments of public functions, checked where they are written, before anything runs.

Each of these returns the value, or raises `InvalidArgument`: what was got, what was wanted, and the
line to write. `line` is what the user wrote, with {} for the value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from reprlib import repr as short_repr
from typing import Any, TypeVar

from rekindle._errors import InvalidArgument

T = TypeVar("T")


def one_of(value: T, choices: tuple[T, ...], line: str) -> T:
    """One of a few words."""
    if any(value is choice or value == choice for choice in choices):
        return value
    shown = [_shown(choice) for choice in choices]
    lines = " or ".join(line.format(each) for each in (shown if len(shown) < 4 else shown[:1]))
    raise InvalidArgument(
        f"{_written(line, value)}: wanted one of {', '.join(shown)}; write {lines}"
    )


def switch(value: bool, line: str) -> bool:
    """True or False, and nothing that would pass for them."""
    if isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        return value
    lines = f"{line.format(True)} or {line.format(False)}"
    raise InvalidArgument(f"{_written(line, value)}: wanted True or False; write {lines}")


def number(value: Any, least: float, line: str, instead: str) -> Any:
    """A number of at least `least`. instead: one that makes sense."""
    kinds = (int,) if isinstance(least, int) else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and value >= least:
        return value
    wanted = f"a{' whole' * isinstance(least, int)} number of at least {least}"
    raise InvalidArgument(f"{_written(line, value)}: wanted {wanted}; write {line.format(instead)}")


def function(
    value: Any, line: str, instead: str, *arguments: object, wanted: str = "a function"
) -> Callable[..., Any]:
    """What can be called with so many arguments. instead: what to write in its place."""
    if not callable(value):
        got = _kind(value) + " (a call in place of a function?)" * (value is None)
    elif (missing := _unlike(value, arguments)) is None:
        return value
    else:
        got = f"{_kind(value)} ({missing})"
    raise InvalidArgument(
        f"{line.format('...')}: got {got}, wanted {wanted}; write {line.format(instead)}"
    )


def step(value: Any, line: str) -> Callable[[], object]:
    """A function that takes one step of training."""
    wanted = "a function that takes one step, without arguments"
    return function(value, line, "lambda: step(batch)", wanted=wanted)


def kind(value: T, wanted: Any, name: str, line: str, instead: str) -> T:
    """An object of that type, or of one of several. name: of what is wanted."""
    if isinstance(value, wanted):
        return value
    raise InvalidArgument(
        f"{line.format('...')}: got {_kind(value)}, wanted {name}; write {line.format(instead)}"
    )


def _unlike(value: Callable[..., Any], arguments: tuple[object, ...]) -> str | None:
    """Why it cannot be called with these; None: it can, for all that is known."""
    try:
        signature = inspect.signature(getattr(value, "forward", value))  # of a module: its own
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _kind(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _shown(choice: object) -> str:
    return f'"{choice}"' if isinstance(choice, str) else repr(choice)


def _written(line: str, value: object) -> str:
    return line.format(short_repr(value))
