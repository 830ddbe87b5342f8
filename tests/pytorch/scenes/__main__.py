"""Run random programs: `python -m tests.pytorch.scenes --programs 3000`.

With `--mode peak` each budget is the memory peak of plain PyTorch plus a few percent. Every program
must run within it. Programs run in processes of their own, some at a time. A program that hangs,
exhausts memory or ends its process is a complaint about its seed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter

import click
import torch

from tests.pytorch.scenes.play import MODES, judge

SECONDS = 600.0  # seconds for one program in all its modes, on a busy machine
MEMORY = 8 << 30
AT_A_TIME = 25


@click.command()
@click.option("--programs", default=300, show_default=True, help="How many.")
@click.option("--seed", default=0, show_default=True, help="Of the first; the next has the next.")
@click.option("--modes", default=2, show_default=True, help="In how many modes each is played.")
@click.option("--mode", "only", multiple=True, type=click.Choice(list(MODES)), help="Only these.")
@click.option("--here", is_flag=True, help="In this process, for a debugger.")
def main(programs: int, seed: int, modes: int, only: tuple[str, ...], here: bool) -> None:
    """Run random programs in plain PyTorch and within budgets; print those with a wrong result."""
    if here:
        _play_here(range(seed, seed + programs), modes, only)
        return
    counts: Counter[str] = Counter()
    began, number = time.monotonic(), seed
    while number < seed + programs:
        number = _play_there(number, seed + programs, modes, only, counts)
        done, took = number - seed, time.monotonic() - began
        click.echo(f"{done} of {programs}: {dict(counts)}, {took:.0f} s", err=True)
    click.echo(f"{programs} programs from seed {seed}: {dict(counts)}")
    sys.exit(bool(counts["wrong"]))


def _play_here(seeds: range, modes: int, only: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in seeds:
        print(json.dumps({"begins": number}), flush=True)  # noqa: T201
        outcome = judge(number, modes, only)
        print(json.dumps(vars(outcome)), flush=True)  # noqa: T201


def _play_there(
    first: int, end: int, modes: int, only: tuple[str, ...], counts: Counter[str]
) -> int:
    """Run some programs in a process; return the seed to continue with."""
    last = min(first + AT_A_TIME, end)
    words = ["--seed", str(first), "--programs", str(last - first), "--modes", str(modes), "--here"]
    words += [word for mode in only for word in ("--mode", mode)]
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "tests.pytorch.scenes", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output, complaint = process.communicate(timeout=SECONDS * (last - first) / 4 + SECONDS)
        _, fatal, where = complaint.partition("Fatal Python error")
        reported = (fatal + where)[:1500] if fatal else complaint.strip()[-1500:]
        ended = f"ended with {process.returncode}: {reported}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ended = "hangs"
    at = first
    for line in output.splitlines():
        found = json.loads(line)
        if "begins" in found:
            at = found["begins"]
            continue
        kind = (
            "undetermined" if found["undetermined"] else "wrong" if found["complaint"] else "same"
        )
        counts[kind] += 1
        at = found["seed"] + 1
        if kind == "wrong":
            click.echo(f"seed {found['seed']}, {found['scene']}, {found['mode']}: "
                       f"{found['complaint']}\n    {found['drawn']}")  # fmt: skip
    if at < last:
        counts["wrong"] += 1
        click.echo(f"seed {at}: {ended}")
        return at + 1
    return last


if __name__ == "__main__":
    main()
