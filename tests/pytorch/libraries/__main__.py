"""Train models of other libraries within budgets: `scripts/sweep libraries`.

The libraries are no dependencies of this project. A program whose library is not installed is
skipped; `--list` names what each program needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import click

from tests.pytorch.libraries.programs import LIBRARIES, PROGRAMS, architectures

SECONDS = 900  # seconds for one program with all budgets, on a busy machine


@click.command()
@click.option("--only", multiple=True, metavar="NAME", help="Only these programs.")
@click.option("--list", "lists", is_flag=True, help="List the programs and their libraries.")
@click.option("--architectures", "all_of_them", is_flag=True, help="Those of transformers.")
@click.option("--here", default="", metavar="NAME", help="This program, in this process.")
def main(only: tuple[str, ...], lists: bool, all_of_them: bool, here: str) -> None:
    """Run each program in plain PyTorch, and within 0.7 and 0.45 of its memory peak.

    The results of all runs must have equal bits.
    """
    if here:
        _judge_here(here)
        return
    if lists:
        for name in PROGRAMS:
            click.echo(f"{name:24} {LIBRARIES[name]}")
        return
    names = only or tuple(architectures() if all_of_them else PROGRAMS)
    counts: Counter[str] = Counter()
    for name in names:
        kind, text = _judge_there(name)
        counts[kind] += 1
        click.echo(f"{name}: {text}", err=kind == "same")
    click.echo(f"{len(names)} programs: {dict(counts)}")
    sys.exit(bool(counts["wrong"]))


def _judge_here(name: str) -> None:
    import torch

    from tests.pytorch.libraries.judge import judge
    from tests.pytorch.libraries.programs import program_of

    torch.set_num_threads(1)
    try:
        outcome = judge(name, program_of(name))
    except ImportError as error:
        print(json.dumps({"skipped": str(error)}))  # noqa: T201
        return
    print(json.dumps(vars(outcome)))  # noqa: T201


def _judge_there(name: str) -> tuple[str, str]:
    """Judge `name` in a process of its own; return the verdict and the message."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.pytorch.libraries", "--here", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS,
                              env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return "wrong", f"not done after {SECONDS} s"
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        return "wrong", f"exit {done.returncode}: {done.stderr.strip()[-600:]}"
    found = json.loads(last)
    if "skipped" in found:
        return "skipped", found["skipped"]
    if found["wrong"]:
        return "wrong", "; ".join(found["wrong"])
    kind = "same" if found["deterministic"] else "not deterministic"
    return kind, f"{kind}, {found['budgets']}"


if __name__ == "__main__":
    main()
