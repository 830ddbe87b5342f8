"""Run random programs and compare them: `python -m tests.pytorch.fuzz --programs 10000`."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from random import Random
from typing import Any, get_args

import click
import torch
from benchmarks import _common

from tests.pytorch import cores
from tests.pytorch.fuzz.check import Evict, complaint, report
from tests.pytorch.fuzz.lines import random_program
from tests.pytorch.sweep._results import RESULTS, results, write_results


@click.command()
@click.option("--programs", default=10_000, show_default=True, help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the first; the next has the next.")
@click.option("--longest", default=40, show_default=True, help="Most lines of a program.")
@click.option("--evict", type=click.Choice(get_args(Evict)), default="auto", show_default=True)
@click.option("--save", is_flag=True, help=f"Write {RESULTS}.")
def main(programs: int, seed: int, longest: int, evict: Evict, save: bool) -> None:
    """Run random programs in plain PyTorch and within budgets, and compare them.

    For each program that differs, print a shorter program that differs, too.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()
    counts: Counter[str] = Counter()
    excepted: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(seed, seed + programs):
        rng = Random(number)
        program = random_program(rng, longest)
        tightness = rng.choice((1.0, 1.0, rng.random()))
        with cores.counting():
            wrong = complaint(program, tightness, excepted, evict=evict)
        counts["wrong" if wrong else "passed"] += 1
        if wrong:
            with cores.counting():
                click.echo(f"\nseed {number}: {report(program, tightness, evict=evict)}")
        if sys.stderr.isatty() or (number + 1) % 100 == 0:
            took = time.monotonic() - started
            done = number + 1 - seed
            click.echo(f"\r{done} of {programs}, {dict(counts)}, {took:.0f} s", nl=False, err=True)
    click.echo(f"\n{programs} programs: {counts['passed']} the same, {counts['wrong']} not")
    reasons = dict(sorted((+excepted).items()))
    for reason, number in reasons.items():
        click.echo(f"{number:6}  excepted: {reason}")
    if save:
        same = counts["passed"] - excepted.total()
        found = {"tried": programs, "same": same, "excepted": reasons, "different": counts["wrong"]}
        seconds = time.monotonic() - started
        write_results("programs", *_continued(seed, found, seconds))
    sys.exit(bool(counts["wrong"]))


def _continued(seed: int, found: dict[str, Any], seconds: float) -> tuple[dict[str, Any], float]:
    """Add the saved counts of an earlier run, if it ended at `seed` and at the same commit."""
    first, last = seed, seed + found["tried"] - 1
    before = results().get("programs", {})
    commit = _common.conditions()["commit"]
    if (before.get("last_seed"), before.get("commit")) == (seed - 1, commit):
        first = before["first_seed"]
        seconds += before["seconds"]
        for key in ("tried", "same", "different"):
            found[key] += before[key]
        found["excepted"] = dict(Counter(found["excepted"]) + Counter(before["excepted"]))
    command = f"scripts/sweep fuzz --programs {last - first + 1} --seed {first}"
    return {"command": command, "first_seed": first, "last_seed": last, **found}, seconds


if __name__ == "__main__":
    main()
