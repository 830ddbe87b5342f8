"""`rekindle simulate`: replay recorded programs under budgets and policies."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click

from rekindle._errors import InvalidFile, InvalidTrace
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.cli._options import examples, new_file, plot_file, size, sizes
from rekindle.native import cores
from rekindle.policies import NAMED, PAPER, Swap, named
from rekindle.simulator import (
    RATIOS,
    AllocatorName,
    Case,
    Device,
    Outcome,
    Repair,
    cases,
    run_case,
    sweep,
)


def policy_names(ctx: click.Context, param: click.Parameter, names: Iterable[str]) -> list[str]:
    """Check the names of policies in an option. The error message lists all valid names."""
    for name in names:
        try:
            named(name)
        except KeyError:
            raise click.UsageError(
                f"there is no policy {name!r}; wanted one of: {', '.join(NAMED)}, random:SEED", ctx
            ) from None
    return list(names)


@click.command(
    epilog=examples(
        "rekindle simulate step.jsonl --budget 6GiB",
        "rekindle simulate step.jsonl --ratio 0.7 --ratio 0.5 --policy dtr --policy lru",
        "rekindle simulate step.jsonl --budget 6GiB --allocator expandable --device-memory 7GiB",
        "rekindle simulate traces/ --sweep --plots plots/",
        exits="1: a file cannot be read.",
    )
)
@click.argument("logs", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    callback=policy_names,
    help=(
        "The policy, which chooses the values to evict; may be repeated. Default: thrifty, as in "
        "`rekindle.budget`; with --sweep the seven policies of the DTR paper."
    ),
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="SIZE",
    callback=sizes,
    help="A budget, such as 6GiB; may be repeated.",
)
@click.option(
    "--ratio",
    "ratios",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="A budget as a part of the peak when everything is kept in memory; may be repeated.",
)
@click.option(
    "--sweep", "as_sweep", is_flag=True, help=("Simulate all policies at ratios 1.0, 0.9 ... 0.1.")
)
@click.option(
    "--limit",
    type=click.FloatRange(1),
    default=2.0,
    show_default=True,
    metavar="X",
    help=(
        "Stop a simulated run (thrash) when it takes more than X times its time without a budget."
    ),
)
@click.option(
    "--swap",
    "bandwidth",
    callback=size,
    metavar="SIZE",
    help=(
        "Let policies also swap values to the host and back. SIZE is the bandwidth of each "
        "direction, in bytes per second."
    ),
)
@click.option(
    "--allocator",
    type=click.Choice(get_args(AllocatorName)),
    help=(
        "Simulate the addresses of values by a model of PyTorch's allocator for CUDA: native is "
        "its default, expandable is expandable_segments:True. pages is a model of an allocator "
        "that does not exist yet: large values own whole pages. Prints the memory that the "
        "allocator reserves."
    ),
)
@click.option(
    "--device-memory",
    callback=size,
    metavar="SIZE",
    help="The memory that the simulated allocator can reserve. Default: no limit.",
)
@click.option(
    "--repair",
    type=click.Choice(get_args(Repair)),
    help=(
        "The values to evict when an allocation of --allocator fails although enough bytes are "
        "free in total. window: those at adjacent addresses that cost least to evict. score: one "
        "after another by the policy's score. [default: window]"
    ),
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help=("The number of processes. Default: one for each core."),
)
@click.option(
    "--json", "as_json", is_flag=True, help=("Print one JSON object per run, and nothing else.")
)
@click.option(
    "--csv",
    "csv_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=new_file,
    help="Also write a table to PATH.",
)
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    callback=plot_file,
    help="Also write plots into the folder PATH.",
)
def command(
    logs: tuple[Path, ...],
    policies: list[str],
    budgets: list[Bytes],
    ratios: tuple[float, ...],
    as_sweep: bool,
    limit: float,
    bandwidth: Bytes | None,
    allocator: AllocatorName | None,
    device_memory: Bytes | None,
    repair: Repair | None,
    jobs: int | None,
    as_json: bool,
    csv_path: Path | None,
    plots: Path | None,
) -> None:
    """Replay recorded programs under budgets and policies.

    LOGS are traces of Rekindle (.jsonl), gzipped or not, or folders of them. A simulated run either
    passes, or needs more memory than the budget (oom), or recomputes for longer than the limit
    (thrash).
    """
    if budgets and (ratios or as_sweep):
        raise click.UsageError(
            "got more than one of --budget, --ratio and --sweep, which all set the budgets; "
            "write only one of them"
        )
    if device_memory is not None and (allocator is None or bandwidth is not None):
        raise click.UsageError(
            "--device-memory needs --allocator and cannot be combined with --swap; write "
            "--allocator native, and leave out --swap"
        )
    if repair is not None and allocator is None:
        raise click.UsageError(
            f"--repair {repair} needs --allocator; write --allocator native --repair {repair}"
        )
    device = Device(allocator, device_memory, repair or "window") if allocator else None
    swap = Swap(None, bandwidth, bandwidth) if bandwidth else None
    policies = policies or (list(PAPER) if as_sweep else ["thrifty"])
    paths = expand(logs)
    if not budgets:
        chosen = ratios or (RATIOS if as_sweep else (0.5,))
        wanted = cases(
            paths,
            policies,
            chosen,
            limit=limit,
            swap=swap,
            device=device,
        )
    else:
        wanted = [
            Case(
                str(path),
                policy,
                None,
                budget,
                limit,
                swap=swap,
                device=device,
            )
            for path in paths
            for budget in budgets
            for policy in policies
        ]
    outcomes = run_all(wanted, jobs)
    if csv_path:
        write_csv(outcomes, csv_path)
    if plots:
        from rekindle.report import _paper

        plots.mkdir(parents=True, exist_ok=True)
        _paper.overheads(outcomes, plots / "overhead.svg")
    if as_json:
        for outcome in outcomes:
            click.echo(json.dumps(outcome.as_dict()))
    else:
        _print(outcomes)


def expand(logs: Iterable[Path]) -> list[Path]:
    """Return the given files, and all logs and traces in the given folders."""
    files: list[Path] = []
    for path in logs:
        if path.is_dir():
            files += sorted(
                file for file in path.iterdir() if ".jsonl" in file.suffixes and file.is_file()
            )
        else:
            files.append(path)
    if not files:
        raise click.UsageError(
            f"found no traces (.jsonl files) in {', '.join(map(str, logs))}; to make one, "
            "write rekindle capture SCRIPT.py -o TRACE.jsonl"
        )
    return files


def run_all(wanted: Sequence[Case], jobs: int | None = None) -> list[Outcome]:
    """Run all cases in up to `jobs` processes, with progress on a terminal.

    Returns:
        The outcomes, in the order of `wanted`.
    """
    from rich.console import Console
    from rich.progress import Progress

    jobs = min(jobs or cores(), len(wanted))
    found: dict[int, Outcome] = {}
    try:
        if len(wanted) < 4:
            return [run_case(case) for case in wanted]
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("Simulating", total=len(wanted))
            for position, outcome in sweep(wanted, processes=jobs):
                found[position] = outcome
                progress.advance(task)
    except (InvalidFile, InvalidTrace, OSError) as error:
        raise click.ClickException(str(error)) from None
    return [found[position] for position in range(len(wanted))]


def write_csv(outcomes: Iterable[Outcome], path: Path) -> None:
    """Write a CSV table with a header, one line for each run, and one column for each field."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Outcome)])
        writer.writeheader()
        writer.writerows(outcome.as_dict() for outcome in outcomes)


def _print(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    placed = any(outcome.reserved_bytes for outcome in outcomes)
    table = Table(box=None, pad_edge=False)
    for name in ("log", "policy"):
        table.add_column(name, no_wrap=True)
    for name in (
        "budget",
        "ratio",
        "status",
        "overhead",
        "peak",
        *(["reserved"] if placed else []),
        "evictions",
        "recomputed",
        "time",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        passed = outcome.status == "pass"
        ratio = outcome.ratio or _part(outcome.budget_bytes, outcome.keep_all_bytes)
        cells: list[Any] = [
            outcome.log,
            outcome.policy,
            format_bytes(outcome.budget_bytes) if outcome.budget_bytes else "none",
            f"{ratio:.2f}" if ratio else "",
            outcome.status,
            # `overhead` is the time divided by the time without recomputation
            f"{outcome.overhead - 1:.2%}" if passed else "",
            format_bytes(outcome.peak_bytes),
            *([format_bytes(outcome.reserved_bytes)] if placed else []),
            outcome.evictions,
            outcome.rematerializations,
            f"{outcome.seconds:.2f} s",
        ]
        table.add_row(*map(str, cells))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)


def _part(budget: Bytes | None, everything: Bytes) -> float | None:
    return budget / everything if budget and everything else None
