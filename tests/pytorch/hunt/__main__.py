"""Run random training loops and compare them: `python -m tests.pytorch.hunt --loops 2000`."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import click
import torch

from tests.pytorch.hunt.hunt import Outcome, hunted
from tests.pytorch.hunt.judge import collect_little
from tests.pytorch.hunt.modes import MODES
from tests.pytorch.hunt.shrink import report
from tests.pytorch.sweep._results import RESULTS, write_results


@click.command()
@click.option("--loops", default=2_000, show_default=True, help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the first; the next has the next.")
@click.option("--modes", default=3, show_default=True, help="In how many modes each runs.")
@click.option("--mode", "only", multiple=True, type=click.Choice(list(MODES)), help="Only these.")
@click.option("--known", is_flag=True, help="Complain of what is known as well.")
@click.option("--shrink/--no-shrink", default=True, help="Print a shorter loop.")
@click.option("--save", is_flag=True, help=f"Write {RESULTS}.")
@click.option("--log", type=click.Path(path_type=Path), help="Write what is wrong to this file.")
def main(
    loops: int,
    seed: int,
    modes: int,
    only: tuple[str, ...],
    known: bool,
    shrink: bool,
    save: bool,
    log: Path | None,
) -> None:
    """Run random training loops in plain PyTorch and within budgets, and compare the results.

    For each loop that differs, print a shorter loop that differs, too.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    collect_little()
    counts: Counter[str] = Counter()
    by_mode: Counter[str] = Counter()
    excepted: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(seed, seed + loops):
        outcome = hunted(number, modes, only, known=known)
        counts[outcome.kind] += 1
        counts["refused by PyTorch, drawn again"] += outcome.drawn_again
        by_mode.update(outcome.modes)
        excepted.update(outcome.excepted)
        if outcome.kind == "different":
            reported = _told(number, outcome, shrink=shrink)
            click.echo(reported)
            if log is not None:
                with log.open("a", encoding="utf-8") as file:
                    file.write(reported)
        if sys.stderr.isatty() or (number + 1 - seed) % 20 == 0:
            took = time.monotonic() - started
            done = number + 1 - seed
            click.echo(f"\r{done} of {loops}, {dict(counts)}, {took:.0f} s", nl=False, err=True)
    click.echo(f"\n{loops} loops: {dict(counts)}; runs by mode: {dict(by_mode)}")
    for reason, times in sorted(excepted.items()):
        click.echo(f"{times:6}  runs excepted: {reason}")
    if save:
        command = f"scripts/sweep hunt --loops {loops} --seed {seed}"
        found = {"command": command, "first_seed": seed, "last_seed": seed + loops - 1}
        found |= {"tried": loops, **counts, "runs": dict(by_mode), "excepted": dict(excepted)}
        write_results("loops", found, time.monotonic() - started)
    sys.exit(bool(counts["different"]))


def _told(number: int, outcome: Outcome, *, shrink: bool) -> str:
    assert outcome.mode is not None
    loop, mode, tightness = outcome.loop, outcome.mode, outcome.tightness
    short = report(loop, mode, tightness, grows=outcome.grows) if shrink else ""
    return f"\n\n#### seed {number}: {outcome.complaint}\n{outcome.loop}\n{short}\n"


if __name__ == "__main__":
    main()
