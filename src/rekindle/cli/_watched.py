"""Show what `rekindle run` measures: a status line (--progress), budgets to try (--profile)."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import click

from rekindle._types import Bytes
from rekindle._units import format_bytes

if TYPE_CHECKING:
    from rekindle.pytorch import Phases, Run

BETWEEN: Final = 0.2
"""Seconds between two updates of the live line on a terminal."""
BETWEEN_LINES: Final = 10.0


def unwatched() -> nullcontext[None]:
    """Return a context manager that does nothing, for a run without the option --progress."""
    return nullcontext()


@contextmanager
def progress(run: Run) -> Generator[None]:
    """Show the status of a run after each training step, until the context ends.

    On a terminal the status is one line below the program's output. Elsewhere a line is printed
    every `BETWEEN_LINES` seconds. Output that goes to a file or a pipe is left alone.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    shown = float("-inf")
    live = None
    if sys.stderr.isatty():
        live = Live(
            Text(""),
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
        )

    def show(_: object) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < (BETWEEN if live else BETWEEN_LINES):
            return
        shown = now
        if live is None:
            click.echo(f"rekindle: {run.status()}", err=True)
        else:
            # A line that is too long for the terminal is cut off.
            line = Text(run.status(), no_wrap=True, overflow="ellipsis")
            live.update(line, refresh=True)

    run.on_step(show)
    with live or nullcontext():
        yield


def found_by(phases: Phases) -> str:
    """Format what --profile found: the smallest budgets, and the time lost within other budgets."""
    if not phases.whole:
        return "--profile: nothing was measured, because no operator ran within the budget"
    lines = [f"smallest budgets by simulation, with a margin of {phases.MARGIN:.0%}:"]
    for name, budget in (*phases.budgets.items(), ("the whole run", phases.whole)):
        lines.append(f"  {name:<13}  {format_bytes(budget):>11}   --budget {smallest(budget)}")
    if phases.sliceable:
        lines.append(
            f"in slices, {', '.join(phases.sliceable)} may need less: try smaller budgets, or "
            "rekindle profile train.py:step, with a function that takes one step"
        )
    others = phases.other_budgets(6)
    if others:
        lines.append("time lost by a step within other budgets, by simulation:")
    for budget, lost in others:
        lines.append(f"  {format_bytes(budget):>11}   time lost {lost:.1%}")
    return "\n".join([*lines, f"smallest budget: --budget {smallest(phases.whole)}"])


def smallest(budget: Bytes) -> str:
    """Format a budget for a command line: in KiB below 16 MiB, else in MiB, rounded up."""
    unit, size = ("KiB", 1 << 10) if budget < 16 << 20 else ("MiB", 1 << 20)
    return f"{-(-budget // size)}{unit}"
