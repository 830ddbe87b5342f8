"""Run a test database of PyTorch: `python -m tests.pytorch.sweep DATABASE` (see --help).

`scripts/sweep` calls this program.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Literal

import click
import torch

from tests.pytorch import cores
from tests.pytorch.sweep import _everything, _exceptions
from tests.pytorch.sweep._results import RESULTS, write_results
from tests.pytorch.sweep._tally import Tally, tally
from tests.pytorch.sweep._verdict import Entries

DATABASES = ("opinfo", "modules", "optimizers")
PROGRESS_SECONDS = 10


@dataclass(frozen=True)
class Job:
    """One entry of a database, which a worker process runs."""

    database: str
    entry: str
    few: int | None
    evict: Literal["saved", "auto", "anything"]

    def run(self) -> Tally:
        _everything.evict = self.evict
        torch.set_num_threads(1)
        exempt = getattr(_exceptions, self.database.upper())
        cases = entries_of(self.database)[self.entry](self.few)
        with cores.counting():
            return tally(self.entry, cases, exempt, every=self.few is None, evict=self.evict)


def entries_of(database: str) -> Entries:
    return import_module(f"tests.pytorch.sweep.{database}").entries()


def sweep(jobs: list[Job], processes: int) -> Tally:
    """Run all entries; print the progress every few seconds."""
    total = Tally()
    said = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        running = [pool.submit(Job.run, job) for job in jobs]
        for done, future in enumerate(as_completed(running), start=1):
            found = future.result()
            total += found
            for failure in found.failures:
                click.echo(f"FAILED {failure}", err=True)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                click.echo(f"{done} of {len(jobs)} entries, {total.tried} cases", err=True)
    return total


@click.command()
@click.argument("database", type=click.Choice(DATABASES))
@click.option("--only", multiple=True, metavar="NAME", help="Only this entry; may be repeated.")
@click.option("--shard", default="1/1", metavar="I/N", help="The I-th of N parts, from 1.")
@click.option(
    "--few",
    type=int,
    help="So many samples of each entry and dtype, drawn by a seed; default: all.",
)
@click.option(
    "--evict",
    type=click.Choice(("saved", "auto", "anything")),
    default="saved",
    show_default=True,
    help="As in rekindle.budget.",
)
@click.option("--processes", default=2, show_default=True, help="How many at once.")
@click.option("--save", is_flag=True, help=f"Write {RESULTS}.")
def main(
    database: str,
    only: tuple[str, ...],
    shard: str,
    few: int | None,
    evict: Literal["saved", "auto", "anything"],
    processes: int,
    save: bool,
) -> None:
    """Run PyTorch's own operators, modules or optimizers within a budget, and compare all bits."""
    names = list(entries_of(database))
    if unknown := [name for name in only if name not in names]:
        raise click.BadParameter(f"{unknown[0]} is no entry of {database}", param_hint="--only")
    part, parts = _shard(shard)
    chosen = [name for name in names if name in only or not only][part - 1 :: parts]
    started = time.monotonic()
    total = sweep([Job(database, name, few, evict) for name in chosen], processes)
    click.echo(f"{'entries':32} {len(chosen)} of {len(names)}")
    for line in total.table():
        click.echo(line)
    if save:
        label = database if evict == "saved" else f"{database}, evict={evict}"
        counts = {"entries": len(chosen), **total.as_data()}
        write_results(label, counts, time.monotonic() - started)
    sys.exit(bool(total.failures))


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise click.BadParameter(f"got {text}; write --shard 1/8", param_hint="--shard")


if __name__ == "__main__":
    main()
