"""`rekindle profile`: measure the memory of a training step and predict smaller budgets."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from rekindle._errors import InvalidArgument
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.cli._options import examples, memory, new_file, size
from rekindle.cli._program import step_of
from rekindle.report import Profile


@click.command(
    epilog=examples(
        "rekindle profile train.py:step",
        "rekindle profile train.py:step --html step.html --fits 8GB",
        "rekindle profile train.py:step --swap 64GiB",
        "rekindle profile train.py --budget 2GiB -- --epochs 1",
        exits="1: the step does not fit into --budget, or into what --fits says.",
    )
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--budget",
    metavar="SIZE",
    callback=size,
    help=(
        "Measure PROGRAM within this budget, such as 6GiB, if it does not fit into memory "
        "without one. Default: no limit."
    ),
)
@click.option(
    "--swap",
    metavar="SIZE",
    callback=memory,
    help=(
        "The most host memory for weights, gradients and optimizer state that move. Smaller "
        "budgets are then measured, not predicted. PROGRAM must be a function."
    ),
)
@click.option("--swap-directory", metavar="FOLDER", help="The folder for the swap file.")
@click.option(
    "--slowdown",
    type=click.FloatRange(min=1),
    metavar="X",
    help="Also print the smallest budget with which a step takes at most X times as long.",
)
@click.option(
    "--fits", metavar="SIZE", callback=size, help=("Also print whether the step fits into SIZE.")
)
@click.option(
    "--repeats",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help=(
        "The number of timed runs of a function; 0: the function runs once, without timing. A "
        "script runs once."
    ),
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=new_file,
    help="Also write the report as a web page, which needs no network.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=new_file,
    help="Also write the report as JSON, for `rekindle report`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
@click.pass_context
def command(
    ctx: click.Context,
    program: str,
    arguments: tuple[str, ...],
    budget: Bytes | None,
    swap: Bytes | None,
    swap_directory: str | None,
    slowdown: float | None,
    fits: Bytes | None,
    repeats: int,
    html: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure the memory of PROGRAM, and predict its time within smaller budgets.

    PROGRAM is a function that makes one training step, SCRIPT.py:FUNCTION or MODULE:FUNCTION, or a
    script, SCRIPT.py, which runs once as a whole. A function runs several times, and weights,
    gradients and optimizer state are restored after each run. The script finds ARGUMENTS in
    sys.argv; put -- before arguments that begin with a dash.
    """
    import rekindle

    sys.argv = [program.partition(":")[0], *arguments]
    step, is_function = step_of(program)
    if swap is not None and (not is_function or not repeats or budget is not None):
        raise click.UsageError(
            "--swap runs a function several times within several budgets; write "
            "rekindle profile --swap 64GiB train.py:step, without --budget and --repeats 0"
        )
    if as_json and slowdown is not None:
        raise click.UsageError(
            "got both --json, which prints the report and nothing else, and --slowdown; leave one "
            "of them out. The report's `curve` has the time within each budget"
        )
    profile = rekindle.profile(
        step,
        budget=budget,
        repeats=repeats if is_function else 0,
        swap=swap,
        swap_directory=swap_directory,
    )
    if not is_function:
        of_run = replace(profile.report, title="A profile of one run", measured="run")
        profile = replace(profile, report=of_run)
    if html is not None:
        html.write_text(profile.to_html(), encoding="utf-8")
    if output is not None:
        output.write_text(profile.to_json(), encoding="utf-8")
    if as_json:
        click.echo(profile.to_json())
    else:
        profile.show()
        _answers(profile, slowdown, fits)
    ctx.exit(0 if fits is None or profile.fits(fits) else 1)


def _answers(profile: Profile, slowdown: float | None, fits: Bytes | None) -> None:
    """Print the smallest budget for `--slowdown`, and whether the step fits `--fits`."""
    if slowdown is not None:
        try:
            enough = profile.budget_for(slowdown)
        except InvalidArgument as error:
            click.echo(f"\n{error}")
        else:
            click.echo(f"\nslowdown {slowdown:.2f}: rekindle.budget({enough})")
    if fits is not None:
        fine = "fits" if profile.fits(fits) else "does not fit"
        click.echo(f"\nit {fine} into {format_bytes(fits)}")
