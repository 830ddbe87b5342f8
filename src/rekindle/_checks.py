"""Check the arguments of public functions when the user calls them, before anything runs.

Each public function of this module returns its argument `value` if the value is accepted, and
otherwise raises `InvalidArgument`. The message has the value that it got, what is accepted, and the
line to write. The argument `line` is the source line that the user wrote, with {} in the place of
the value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from reprlib import repr as short_repr
from typing import Any, TypeVar

from rekindle._errors import InvalidArgument

T = TypeVar("T")


def one_of(value: T, choices: tuple[T, ...], line: str) -> T:
    """Check that `value` is one of `choices`."""
    if any(value is choice or value == choice for choice in choices):
        return value
    shown = [_shown(choice) for choice in choices]
    lines = " or ".join(line.format(each) for each in (shown if len(shown) < 4 else shown[:1]))
    raise InvalidArgument(
        f"{_written(line, value)}: wanted one of {', '.join(shown)}; write {lines}"
    )


def switch(value: bool, line: str) -> bool:
    """Check that `value` is a bool; other truthy and falsy values are refused."""
    if isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        return value
    lines = f"{line.format(True)} or {line.format(False)}"
    raise InvalidArgument(f"{_written(line, value)}: wanted True or False; write {lines}")


def number(value: Any, least: float, line: str, instead: str) -> Any:
    """Check that `value` is at least `least`. If `least` is an int, `value` must be whole.

    Args:
        value: The argument to check.
        least: The smallest value that is accepted.
        line: The user's source line, with {} for the value. The error message shows it corrected.
        instead: The value that the error message puts into the corrected line.
    """
    kinds = (int,) if isinstance(least, int) else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and value >= least:
        return value
    wanted = f"a{' whole' * isinstance(least, int)} number of at least {least}"
    raise InvalidArgument(f"{_written(line, value)}: wanted {wanted}; write {line.format(instead)}")


def function(
    value: Any, line: str, instead: str, *arguments: object, wanted: str = "a function"
) -> Callable[..., Any]:
    """Check that `value` is callable with `arguments`, without calling it.

    Args:
        value: The argument to check.
        line: The user's source line, with {} for the value. The error message shows it corrected.
        instead: The expression that the error message puts into the corrected line.
        arguments: Example arguments; only their number matters.
        wanted: How the error message describes an accepted value.
    """
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
    """Check that `value`, a function that makes one training step, needs no arguments."""
    wanted = "a function that takes one step, without arguments"
    return function(value, line, "lambda: step(batch)", wanted=wanted)


def kind(value: T, wanted: Any, name: str, line: str, instead: str) -> T:
    """Check that `value` is an instance of `wanted`.

    Args:
        value: The argument to check.
        wanted: A type, or a tuple of types.
        name: How the error message describes the wanted type.
        line: The user's source line, with {} for the value. The error message shows it corrected.
        instead: The expression that the error message puts into the corrected line.
    """
    if isinstance(value, wanted):
        return value
    raise InvalidArgument(
        f"{line.format('...')}: got {_kind(value)}, wanted {name}; write {line.format(instead)}"
    )


def _unlike(value: Callable[..., Any], arguments: tuple[object, ...]) -> str | None:
    """Return why `value` cannot be called with `arguments`; None if it can, or if not known."""
    try:
        # `nn.Module.__call__` takes anything; its `forward` has the real signature.
        signature = inspect.signature(getattr(value, "forward", value))
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
