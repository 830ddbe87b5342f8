"""`rekindle capture`: write a trace of one training step to a file."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from rekindle._errors import RekindleError
from rekindle._units import format_bytes, format_ns
from rekindle.cli._options import examples, refuse_missing_folder
from rekindle.cli._program import step_of


@click.command(
    epilog=examples(
        "rekindle capture train.py:step -o step.jsonl",
        "rekindle capture train.py -o run.jsonl.gz -- --epochs 1",
        exits="1: the program cannot be captured.",
    )
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file for the trace, such as step.jsonl; compressed if the name ends in .gz.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    metavar="N",
    help=(
        "The number of calls of the function before the recorded call: the first step also "
        "creates gradients and optimizer state. A script runs once."
    ),
)
def command(program: str, arguments: tuple[str, ...], output: Path, warm_up: int) -> None:
    """Run PROGRAM and record a trace of it, for `rekindle simulate` and `rekindle plan`.

    PROGRAM is a script, SCRIPT.py, which runs once as a whole, or a function without arguments that
    makes one training step: SCRIPT.py:FUNCTION or MODULE:FUNCTION. The script finds ARGUMENTS in
    sys.argv; put -- before arguments that begin with a dash.
    """
    import rekindle
    from rekindle.trace import keep_all_peak
    from rekindle.trace.formats import save

    refuse_missing_folder(f"-o {output}", output)
    sys.argv = [program.partition(":")[0], *arguments]
    step, is_function = step_of(program)
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
