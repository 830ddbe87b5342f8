"""`rekindle capture`: what one step of a training script does, as a trace in a file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rekindle._errors import RekindleError
from rekindle._units import format_bytes, format_ns
from rekindle.cli._program import function, script


@click.command
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The trace, such as step.jsonl; gzipped if the name ends in .gz.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help="Calls of the function before the one that is written down: the first step makes "
    "gradients and optimizer state that later ones find. A script runs once.",
)
def command(program: str, arguments: tuple[str, ...], output: Path, warm_up: int) -> None:
    """Run PROGRAM and write down what it did, for `rekindle simulate` and `rekindle plan`.

    PROGRAM is a script, SCRIPT.py, which runs once as a whole, or a function without arguments that
    makes one training step: SCRIPT.py:FUNCTION or MODULE:FUNCTION. What follows it is what the
    script finds in sys.argv; put -- before arguments that begin with a dash.
    """
    import rekindle
    from rekindle.trace import keep_all_peak
    from rekindle.trace.formats import save

    _can_be_written(output)
    sys.argv = [program.partition(":")[0], *arguments]
    step, is_function = _step(program)
    for _ in range(warm_up if is_function else 0):
        step()
    try:
        trace = rekindle.capture(step)
        save(trace, output)
    except RekindleError as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{output}: {len(trace.ops)} operators, {format_ns(trace.compute_ns)}; keeping everything "
        f"takes {format_bytes(keep_all_peak(trace))}"
    )


def _can_be_written(path: Path) -> None:
    """Not after an hour of computing."""
    if not path.parent.is_dir():
        raise click.UsageError(f"-o {path}: there is no folder {path.parent}")


def _step(program: str) -> tuple[Callable[[], Any], bool]:
    """What to run, and whether it is a function, which may run more than once."""
    place, _, name = program.partition(":")
    if name:
        return function(place, name), True
    if not place.endswith(".py"):
        raise click.UsageError(f"{program!r}: write SCRIPT.py or MODULE:FUNCTION")
    path = script(place)
    return lambda: runpy.run_path(str(path), run_name="__main__"), False
