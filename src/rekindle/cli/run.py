"""`rekindle run`: run an unmodified program within a budget."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rekindle._cache import switch_off
from rekindle._errors import InvalidArgument, InvalidBudget, OutOfBudget
from rekindle._types import Bytes
from rekindle._units import parse_bytes
from rekindle.cli._main_program import MainProgram, show
from rekindle.cli._options import amount, examples, memory, policy_name, writable
from rekindle.cli._watched import found_by, progress, smallest, unwatched

if TYPE_CHECKING:
    from rekindle.pytorch import Phases, Run

Reports = tuple[tuple[str, Path], ...]


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "rekindle run --budget 6GiB train.py --epochs 3",
        "rekindle run --budget 6GiB --report html run.html -m package.train",
        "rekindle run --profile train.py",
        "torchrun --nproc-per-node 2 -m rekindle run --budget 6GiB train.py",
        "accelerate launch -m rekindle run --budget 6GiB train.py",
        exits="Otherwise the exit code is that of PROGRAM.",
    ),
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for `python -m`.")
@click.option(
    "--budget",
    metavar="SIZE",
    default="auto",
    show_default=True,
    callback=amount,
    help=(
        "The memory budget, such as 6GiB. auto: the value of REKINDLE_BUDGET if that is set, "
        "else the free memory of the device. none: no limit, the run is only measured."
    ),
)
@click.option(
    "--policy",
    metavar="NAME",
    callback=policy_name,
    help=("The policy, which chooses the values to evict."),
)
@click.option(
    "--learn",
    is_flag=True,
    help=("Plan training steps that repeat, from the first repetition on."),
)
@click.option(
    "--learn-wait",
    is_flag=True,
    help=("As --learn, and wait for each plan at the end of a step."),
)
@click.option(
    "--no-learn",
    is_flag=True,
    help=("Never plan steps. Default: plan steps that repeat often, if values are evicted."),
)
@click.option(
    "--no-cache",
    is_flag=True,
    help="Store no plans for later runs, and use none of earlier runs.",
)
@click.option(
    "--swap",
    metavar="SIZE",
    callback=memory,
    help=("The most host memory to use for swapped values."),
)
@click.option("--swap-directory", metavar="FOLDER", help="The folder for the swap file.")
@click.option(
    "--evict",
    type=click.Choice(["saved", "auto", "anything"]),
    default="auto",
    show_default=True,
    help=(
        "The values to evict. saved: those that only autograd holds. auto: if nothing else is left "
        "to evict, also those that variables of PROGRAM hold. anything: both kinds at any time."
    ),
)
@click.option(
    "--of",
    type=click.Choice(["allocated", "reserved"]),
    default="allocated",
    show_default=True,
    help=(
        "On CUDA, the memory to limit: that of tensors, or all that PyTorch's allocator reserves "
        "for them."
    ),
)
@click.option(
    "--device",
    metavar="NAME",
    help=(
        "The device whose memory the budget limits. Default: CUDA if there is a CUDA device (the "
        "one with the number in LOCAL_RANK), else the CPU."
    ),
)
@click.option("--record", is_flag=True, help="Record every operator, for more detailed reports.")
@click.option(
    "--report",
    "reports",
    type=(click.Choice(["text", "html", "json"]), click.Path(dir_okay=False, path_type=Path)),
    multiple=True,
    callback=writable,
    metavar="FORMAT PATH",
    help="Write the report to PATH, as text, html or json, instead of showing it; may be repeated.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no report at the end.")
@click.option(
    "--progress",
    "live",
    is_flag=True,
    help=("Show the memory in use and the time lost while the program runs."),
)
@click.option(
    "--profile",
    "measured",
    is_flag=True,
    help=(
        "At the end, show the smallest budget of each phase of the run (such as training or "
        "evaluation), and the predicted time lost within other budgets."
    ),
)
@click.pass_context
def command(
    ctx: click.Context,
    program: str,
    arguments: tuple[str, ...],
    is_module: bool,
    budget: str | Bytes | None,
    policy: str | None,
    learn: bool,
    learn_wait: bool,
    no_learn: bool,
    no_cache: bool,
    swap: Bytes | None,
    swap_directory: str | None,
    evict: Any,
    of: Any,
    device: str | None,
    record: bool,
    reports: Reports,
    quiet: bool,
    live: bool,
    measured: bool,
) -> None:
    """Run an unmodified PROGRAM within a budget.

    PROGRAM runs as with `python PROGRAM ARGUMENTS`: with the same sys.argv, __main__, working
    folder, output and exit code. A report follows on standard error, also after an exception or
    Ctrl-C. Options of this command stand before PROGRAM; everything after it belongs to PROGRAM.

    Each process started by torchrun or accelerate has a budget of its own, and writes reports of
    its own: run.html becomes run-rank1.html.
    """
    from rekindle.pytorch import Phases, device_of_program
    from rekindle.pytorch import budget as within

    if no_cache:
        switch_off()
    if no_learn and (learn or learn_wait):
        raise click.UsageError(
            f"got both {'--learn' if learn else '--learn-wait'} and --no-learn; leave one of them "
            "out"
        )
    if measured and (learn or learn_wait):
        raise click.UsageError(
            "got both --profile and --learn, which record steps for different purposes; leave "
            "one of them out"
        )
    if measured and swap is not None and evict == "anything":
        raise click.UsageError(
            "got --profile with --swap and --evict anything: it simulates budgets, and no "
            "simulation knows weights and optimizer state that move to the host. Write rekindle "
            "profile --swap 64GiB train.py:step, with a function that takes one step"
        )
    try:
        context = within(
            budget,
            policy=policy,
            device=device or device_of_program(),
            record=record,
            learn="wait" if learn_wait else learn or (False if no_learn else "auto"),
            swap=swap,
            swap_directory=swap_directory,
            evict=evict,
            of=of,
        )
    except (InvalidArgument, InvalidBudget) as error:
        raise click.UsageError(str(error)) from None
    job = MainProgram(program, arguments, is_module)
    job.prepare()
    if ctx.get_parameter_source("budget") is not ParameterSource.COMMANDLINE:
        _warn_of_misplaced(program, arguments, is_module)
    code, process, run = 0, os.getpid(), None
    phases: Phases | None = None
    try:
        with context as run:
            phases = Phases(run) if measured else None
            with progress(run) if live else unwatched(), phases.watch() if phases else unwatched():
                job.run()
    except SystemExit:
        raise
    except BaseException as error:
        code = show(_with_a_hint(error, f"-m {program}" if is_module else program))
    finally:
        # Only this process writes the report, not one that the program has forked.
        if run is not None and os.getpid() == process:
            try:
                _tell(run, reports, quiet)
                if phases is not None:
                    click.echo(f"rekindle: {found_by(phases)}", err=True)
            except Exception as error:  # the exit code stays that of the program
                click.echo(f"rekindle: no report: {type(error).__name__}: {error}", err=True)
    ctx.exit(code)


def _warn_of_misplaced(program: str, arguments: Sequence[str], is_module: bool) -> None:
    """Warn if `--budget SIZE` stands after PROGRAM: there it is an argument of PROGRAM."""
    for number, word in enumerate(arguments):
        name, _, value = word.partition("=")
        value = value or (*arguments, "")[number + 1]
        if name == "--budget" and value and _is_size(value):
            shown = f"-m {program}" if is_module else program
            click.echo(
                f"rekindle: --budget {value} comes after {program} on the command line. So "
                f"{program} receives this option, and rekindle takes the memory of the device as "
                "the budget. If the option is meant for rekindle, write rekindle run --budget "
                f"{value} {shown}; otherwise write --budget auto before {program}",
                err=True,
            )
            return


def _is_size(text: str) -> bool:
    try:
        parse_bytes(text)
    except InvalidBudget:
        return False
    return True


def _with_a_hint(error: BaseException, program: str) -> BaseException:
    if isinstance(error, OutOfBudget):
        error.add_note(f"To find a budget for the whole program: rekindle run --profile {program}")
        error.for_command_line(f"--budget {smallest(error.rehearse())}")
    return error


def _tell(run: Run, reports: Reports, quiet: bool) -> None:
    """Write the reports to their files; without --report, print the text to standard error."""
    report = run.report()
    rank = _rank()
    for form, path in reports:
        text = {"text": report.text, "html": report.to_html, "json": report.to_json}[form]()
        place = path if rank is None else path.with_stem(f"{path.stem}-rank{rank}")
        place.write_text(text + "\n", encoding="utf-8")
    if not reports and not quiet:
        sys.stdout.flush()
        whose = "" if rank is None else f" of rank {rank}"
        click.echo(f"\nrekindle: report of this run{whose}\n{report.text()}", err=True)
    if not run.peak:
        click.echo(
            "rekindle: PROGRAM made no tensors in this process. Processes that PROGRAM starts "
            "are outside of the budget: let the launcher start `rekindle run` in each process, "
            "as in torchrun -m rekindle run ...",
            err=True,
        )


def _rank() -> str | None:
    """Return the rank of this process under torchrun or accelerate, or None without these."""
    several = os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
    return os.environ.get("RANK") if several else None
