"""Callbacks for options of several commands: they read what was written, or refuse it."""

from __future__ import annotations

from collections.abc import Callable

import click

from rekindle._errors import InvalidBudget
from rekindle._types import Bytes
from rekindle._units import parse_bytes


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> Bytes | None:
    """An amount of bytes such as "200MB"; refused in the words of `rekindle.budget`."""
    if value is None:
        return None
    try:
        return parse_bytes(value, line=f"{param.opts[0]} {{}}")
    except InvalidBudget as error:
        raise click.UsageError(str(error), ctx) from None


def multiple_of(divisor: int) -> Callable[[click.Context, click.Parameter, int], int]:
    """A whole number that `divisor` divides."""

    def read(ctx: click.Context, param: click.Parameter, value: int) -> int:
        if value % divisor == 0:
            return value
        option, nearest = param.opts[0], divisor * max(round(value / divisor), 1)
        raise click.UsageError(
            f"{option} {value}: wanted a multiple of {divisor}; write {option} {nearest}", ctx
        )

    return read


def examples(*lines: str, exits: str = "") -> str:
    """The end of a command's help: lines to copy, and what its exit codes mean."""
    shown = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
    codes = f"Exit code 0: all is well. {exits} 2: the command line is wrong."
    return f"{shown}\n\n{' '.join(codes.split())}"
