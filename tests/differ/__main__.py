"""Run the programs of a source in plain PyTorch and within budgets: `scripts/sweep SOURCE`."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, get_args

import click

from tests.differ.judge import Outcome, judge
from tests.differ.modes import Evict
from tests.differ.shrink import report
from tests.differ.tally import RESULTS, Tally, write_results, write_seeds
from tests.differ.workers import Work
from tests.pytorch import cores
from tests.pytorch.fuzz.large import random_program as large_program
from tests.pytorch.fuzz.lines import random_program
from tests.pytorch.fuzz.program import modes as fuzz_modes
from tests.pytorch.hunt.hunt import hunted
from tests.pytorch.hunt.modes import MODES as HUNT_MODES
from tests.pytorch.scenes.play import MODES as SCENE_MODES
from tests.pytorch.scenes.play import judged as scene_judged
from tests.pytorch.strangers import suite
from tests.pytorch.strangers.ways import Way
from tests.pytorch.sweep import DATABASES

LABELS = {"fuzz": "programs", "hunt": "loops"}  #: names of sources in the file of results
MEMORY = 8 << 30  #: bytes of address space for a process that runs random programs


@click.group()
def main() -> None:
    """Run the programs of a source in plain PyTorch and within budgets, and compare all bits.

    Programs run in processes of their own. The exit code is 1 if a result is wrong.
    """


def _seeded(programs: int, modes: Sequence[str] = (), most: int = 0) -> Callable[[Any], Any]:
    """Add the options of a source of random programs to a command."""
    options = [
        click.option("--programs", "--loops", "count", default=programs, show_default=True,
                     help="How many."),
        click.option("--seed", default=0, show_default=True,
                     help="Of the first; the next has the next."),
        click.option("--shrink/--no-shrink", default=True, help="Print a shorter program."),
        click.option("--save", is_flag=True, help=f"Write {RESULTS}."),
        click.option("--log", type=click.Path(path_type=Path),
                     help="Write what is wrong to this file."),
        click.option("--here", is_flag=True, help="In this process, for a debugger."),
    ]  # fmt: skip
    if modes:
        options += [
            click.option("--modes", default=most, show_default=True, help="So many modes of each."),
            click.option("--mode", "only", multiple=True, type=click.Choice(list(modes)),
                         help="Only these."),
        ]  # fmt: skip

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _sweep_seeds(
    source: str,
    judged: Callable[[int], Outcome],
    words: Sequence[str],
    portion: int,
    **options: Any,
) -> None:
    """Judge random programs; `words` are the options of the source for the processes."""
    seeds = range(options["seed"], options["seed"] + options["count"])
    shrink = [] if options["shrink"] else ["--no-shrink"]

    def command(some: Sequence[int]) -> list[str]:
        return [source, "--seed", str(some[0]), "--programs", str(len(some)), *words, *shrink]

    def tallied(seed: int) -> Tally:
        outcome = judged(seed)
        # each reason once, so that the counts are those of programs
        found = Tally(Counter({outcome.kind: 1}), outcome.modes, Counter([*outcome.excepted]))
        if outcome.drawn_again:
            found.kinds["refused by PyTorch, drawn again"] += outcome.drawn_again
        if outcome.kind == "different":
            told = f"seed {seed}: {outcome.complaint}\n{outcome.program}"
            found.failures.append(told + (f"\n{report(outcome)}" if options["shrink"] else ""))
        return found

    work = Work(tallied, seeds, command, portion)
    if options["here"]:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        work.here()
        return
    began = time.monotonic()
    total = work.there(log=options["log"])
    for line in total.summary(f"{len(seeds)} programs from seed {options['seed']}"):
        click.echo(line)
    if options["save"]:
        command_line = " ".join([source, *words, "--programs"])
        write_seeds(
            LABELS.get(source, source), command_line, seeds, total, time.monotonic() - began
        )
    sys.exit(bool(total.failures))


def _of_modes(modes: int, only: Sequence[str]) -> list[str]:
    return ["--modes", str(modes), *_each("--mode", only)]


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


@main.command()
@_seeded(10_000)
@click.option("--longest", default=40, show_default=True, help="Most lines of a program.")
@click.option("--evict", type=click.Choice(get_args(Evict)), default="auto", show_default=True)
@click.option("--large", is_flag=True, help="Tensors of up to 2 MiB, for operators in slices.")
@click.option("--threads", type=int, help="Of large programs; default: drawn by the seed.")
def fuzz(longest: int, evict: Evict, large: bool, threads: int | None, **options: Any) -> None:
    """Run random programs of single lines."""

    def judged(seed: int) -> Outcome:
        rng = Random(seed)
        program = large_program(rng, longest, threads) if large else random_program(rng, longest)
        ways = [*fuzz_modes(evict).values()]
        if large:  # budgets between the smallest one and the peak
            ways = ways[1:] * 3
        tightness = rng.choice((1.0, 1.0, rng.random()))
        tight = [tightness, *(rng.random() for _ in ways[1:])]
        return judge(program, zip(ways, tight if large else [tightness] * len(ways), strict=True))

    words = ["--longest", str(longest), "--evict", evict, *(["--large"] if large else [])]
    words += [] if threads is None else ["--threads", str(threads)]
    _sweep_seeds("fuzz", judged, words, 25 if large else 200, **options)


@main.command()
@_seeded(2_000, [*HUNT_MODES], 3)
@click.option("--known", is_flag=True, help="Complain of what is known as well.")
def hunt(modes: int, only: tuple[str, ...], known: bool, **options: Any) -> None:
    """Run random training loops."""
    words = [*_of_modes(modes, only), *(["--known"] if known else [])]
    judged = lambda seed: hunted(seed, modes, only, known=known)  # noqa: E731
    _sweep_seeds("hunt", judged, words, 25, **options)


@main.command()
@_seeded(300, [*SCENE_MODES], 2)
def scenes(modes: int, only: tuple[str, ...], **options: Any) -> None:
    """Run random programs of thirty kinds.

    With `--mode peak` each budget is the memory peak of plain PyTorch plus a few percent. Every
    program must run within it.
    """
    judged = lambda seed: scene_judged(seed, modes, only)  # noqa: E731
    _sweep_seeds("scenes", judged, _of_modes(modes, only), 25, **options)


@main.command()
@click.option("--only", multiple=True, metavar="NAME", help="Only these programs.")
@click.option("--list", "lists", is_flag=True, help="List the programs and their libraries.")
@click.option("--architectures", "all_of_them", is_flag=True, help="Those of transformers.")
@click.option("--here", is_flag=True, help="In this process, for a debugger.")
def libraries(only: tuple[str, ...], lists: bool, all_of_them: bool, here: bool) -> None:
    """Train models of other libraries, also within 0.7 and 0.45 of their memory peaks.

    The libraries are no dependencies of this project. A program whose library is not installed is
    skipped; `--list` names what each program needs.
    """
    from tests.pytorch.libraries import programs
    from tests.pytorch.libraries.trained import MODES, Trained

    if lists:
        for name in programs.PROGRAMS:
            click.echo(f"{name:24} {programs.LIBRARIES[name]}")
        return

    def tallied(name: str) -> Tally:
        try:
            program = Trained(name, programs.program_of(name))
            outcome = judge(program, [(mode, 1.0) for mode in MODES.values()])
        except ImportError as error:
            return Tally(Counter(skipped=1), excepted=Counter({f"skipped {name}: {error}": 1}))
        failures = [f"{name}: {outcome.complaint}"] if outcome.kind == "different" else []
        return Tally(Counter({outcome.kind: 1}), outcome.modes, outcome.excepted, failures=failures)

    names = only or tuple(programs.architectures() if all_of_them else programs.PROGRAMS)
    work = Work(tallied, names, lambda some: ["libraries", *_each("--only", some)], 1, 720.0)
    if here:
        work.here()
        return
    total = work.there()
    for line in total.summary(f"{len(names)} programs"):
        click.echo(line)
    sys.exit(bool(total.failures))


@main.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--way", "ways", multiple=True, type=click.Choice([way.value for way in Way]))
@click.option("-k", "chosen", default="", help="Only tests whose names have this in them.")
@click.option("--write", is_flag=True, help="Write the failures into the list of expected ones.")
def strangers(files: tuple[Path, ...], ways: tuple[str, ...], chosen: str, write: bool) -> None:
    """Run each test of other projects' FILES in plain PyTorch, and in three ways within a budget.

    The files are not part of this project. PyTorch's are in the folder test/ of its repository, at
    the tag of the installed version. Others come with the source distributions of their packages.

    The ways are a budget without a limit, one that evicts everything before each operator, and one
    of 60 % of the test's peak. Tests that pass in plain PyTorch must pass in each way. Known
    exceptions are listed with a reason in tests/pytorch/strangers/expected, which may only shrink.
    """
    there = [file for file in files if file.is_file()]
    if not there:
        click.echo("skipped: no such file. Get test_autograd.py from PyTorch's repository, folder "
                   "test/, and write scripts/sweep strangers PATH/TO/test_autograd.py")  # fmt: skip
        return
    asked = [Way(way) for way in ways] or [Way.WITHIN, Way.EVICTED, Way.TIGHT]
    wrong = [suite.swept(file.resolve(), asked, chosen, write) for file in there]
    sys.exit(any(wrong))


def _database(database: str) -> None:
    """Add the command for one test database of PyTorch."""

    @main.command(database, help=f"Run PyTorch's own samples of {database} within a budget.")
    @click.option("--only", multiple=True, metavar="NAME", help="Only this entry; may be repeated.")
    @click.option("--shard", default="1/1", metavar="I/N", help="The I-th of N parts, from 1.")
    @click.option(
        "--few",
        type=int,
        help="So many samples of each entry and dtype, drawn by a seed; default: all.",
    )
    @click.option(
        "--evict",
        type=click.Choice(get_args(Evict)),
        default="saved",
        show_default=True,
        help="What makes room; see tests/differ/modes.py.",
    )
    @click.option("--processes", default=2, show_default=True, help="How many at once.")
    @click.option("--save", is_flag=True, help=f"Write {RESULTS}.")
    @click.option("--here", is_flag=True, help="In this process, for a debugger.")
    def command(
        only: tuple[str, ...], shard: str, few: int | None, evict: Evict, processes: int,
        save: bool, here: bool,
    ) -> None:  # fmt: skip
        from tests.pytorch.sweep import _exceptions, entries_of
        from tests.pytorch.sweep._tally import tally

        entries = entries_of(database)
        if unknown := [name for name in only if name not in entries]:
            raise click.BadParameter(f"{unknown[0]} is no entry of {database}", param_hint="--only")
        part, parts = _shard(shard)
        chosen = [name for name in entries if name in only or not only][part - 1 :: parts]
        exempt = getattr(_exceptions, database.upper())

        def tallied(name: str) -> Tally:
            with cores.counting():
                return tally(name, entries[name](few), exempt, every=few is None, evict=evict)

        def words(names: Sequence[str]) -> list[str]:
            limit = [] if few is None else ["--few", str(few)]
            return [database, *limit, "--evict", evict, *_each("--only", names)]

        work = Work(tallied, chosen, words)
        if here:
            work.here()
            return
        began = time.monotonic()
        total = work.there(processes)
        click.echo(f"{'entries':32} {len(chosen)} of {len(entries)}")
        for line in total.table():
            click.echo(line)
        if save:
            label = database if evict == "saved" else f"{database}, evict={evict}"
            asked = (word for word in sys.argv[1:] if word != "--save")
            counts = {"entries": len(chosen), **total.as_data()}
            write_results(
                label, " ".join(["scripts/sweep", *asked]), counts, time.monotonic() - began
            )
        sys.exit(bool(total.failures))


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part), int(parts)
    raise click.BadParameter(f"got {text}; write --shard 1/8", param_hint="--shard")


for _name in DATABASES:
    _database(_name)


if __name__ == "__main__":
    main()
