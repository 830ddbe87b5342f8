"""Define click callbacks that several commands share: each converts an option or refuses it."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from rekindle._errors import InvalidArgument, InvalidBudget
from rekindle._types import Bytes
from rekindle._units import parse_bytes, parse_memory
from rekindle.policies import policy_of

_SHARE: Final = re.compile(r"0?\.\d+|.*%")


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> Bytes | None:
    """Read an amount of bytes such as "200MB", with the error messages of `rekindle.budget`."""
    if value is None:
        return None
    try:
        return parse_bytes(value, line=f"{param.opts[0]} {{}}")
    except InvalidBudget as error:
        raise click.UsageError(str(error), ctx) from None


def memory(ctx: click.Context, param: click.Parameter, value: str | None) -> Bytes | None:
    """Read an amount of memory as `size` does, but refuse a small number without a unit."""
    if value is None:
        return None
    try:
        return parse_memory(value, line=f"{param.opts[0]} {{}}")
    except InvalidBudget as error:
        raise click.UsageError(str(error), ctx) from None


def sizes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> list[Bytes]:
    """Read several amounts of bytes. A fraction such as "0.5" is refused with a hint."""
    for value in values:
        if _SHARE.fullmatch(value.strip()):
            raise click.UsageError(
                f"{param.opts[0]} {value}: got a fraction, wanted a size; write --ratio 0.5, or "
                f"{param.opts[0]} 6GiB",
                ctx,
            )
    return [found for value in values if (found := size(ctx, param, value)) is not None]


def amount(ctx: click.Context, param: click.Parameter, value: str) -> str | Bytes | None:
    """Read a budget for `rekindle.budget`: an amount of bytes, "auto", or "none" for no limit."""
    word = value.strip().lower()
    if word == "none":
        return None
    return word if word == "auto" else memory(ctx, param, value)


def policy_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check the name of a policy in an option. The error message lists all valid names."""
    if value is not None:
        try:
            policy_of(value)
        except InvalidArgument as error:
            raise click.UsageError(str(error), ctx) from None
    return value


def writable(
    ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, Path], ...]
) -> tuple[tuple[str, Path], ...]:
    """Check that the folders of output files exist now, not after the program has run.

    The paths become absolute, because the program may change its working folder.
    """
    for _, path in value:
        refuse_missing_folder(param.opts[0], path, ctx)
    return tuple((form, path.absolute()) for form, path in value)


def new_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Check that the folder of an output file exists now, and make its path absolute."""
    if value is None:
        return None
    refuse_missing_folder(f"{param.opts[-1]} {value}", value, ctx)
    return value.absolute()


def plot_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Check now that matplotlib can draw into a file, not after a long search."""
    if value is not None and find_spec("matplotlib") is None:
        raise click.ClickException(
            f"{param.opts[0]} needs matplotlib; write: pip install matplotlib"
        )
    return new_file(ctx, param, value)


def refuse_missing_folder(option: str, path: Path, ctx: click.Context | None = None) -> None:
    """Refuse an output file whose folder does not exist.

    Args:
        option: The option that names the file, for the error.
        path: The file.
        ctx: The context of the command, whose usage the error shows.

    Raises:
        UsageError: There is no such folder.
    """
    if not path.parent.is_dir():
        raise click.UsageError(
            f"{option}: there is no folder {path.parent}; make it, or name an existing folder", ctx
        )


def multiple_of(divisor: int) -> Callable[[click.Context, click.Parameter, int], int]:
    """Make a callback that checks that the number in an option is a multiple of `divisor`."""

    def read(ctx: click.Context, param: click.Parameter, value: int) -> int:
        if value % divisor == 0:
            return value
        option, nearest = param.opts[0], divisor * max(round(value / divisor), 1)
        raise click.UsageError(
            f"{option} {value}: wanted a multiple of {divisor}; write {option} {nearest}", ctx
        )

    return read


def examples(*lines: str, exits: str = "") -> str:
    """Format the end of a command's help: lines to copy, and the meaning of the exit codes."""
    shown = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
    codes = f"Exit code 0: all is well. {exits} 2: the command line is wrong."
    return f"{shown}\n\n{' '.join(codes.split())}"
