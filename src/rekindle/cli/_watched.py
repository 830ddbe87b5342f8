"""What `rekindle run` shows while a program runs: a live line, and what a step would need."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import click

from rekindle._errors import RekindleError
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.policies import Policy
from rekindle.trace import Trace

if TYPE_CHECKING:
    from rekindle.pytorch import Run

BETWEEN: Final = 0.2
"""Seconds between two pictures of the live line, and where there is no terminal: lines."""
BETWEEN_LINES: Final = 10.0


def unwatched() -> nullcontext[None]:
    """In the place of `progress`."""
    return nullcontext()


@contextmanager
def progress(run: Run) -> Generator[None]:
    """After each step the status on a line that stays below all output; elsewhere now and then."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    shown = float("-inf")
    live = Live(Text(""), console=console, auto_refresh=False) if console.is_terminal else None

    def show(_: object) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < (BETWEEN if live else BETWEEN_LINES):
            return
        shown = now
        if live is None:
            click.echo(f"rekindle: {run.status()}", err=True)
        else:
            line = Text(run.status(), no_wrap=True, overflow="ellipsis")  # fits in 80 columns
            live.update(line, refresh=True)

    run.on_step(show)
    with live or nullcontext():
        yield


def measure(run: Run) -> None:
    """Writes the second step down, which meets the optimizer's state, and says what it needs."""

    def after(step: Any) -> None:
        if step.number == 1:
            run.begin_trace()
        elif step.number == 2:
            try:
                found = _needs(run.end_trace(), run.policy)
            except RekindleError as error:
                found = f"the second step could not be measured: {error}"
            click.echo(f"rekindle: {found}", err=True)

    run.on_step(after)


def _needs(trace: Trace, policy: Policy) -> str:
    from rekindle.simulator import curve

    points = curve(trace, policy, points=6)
    if not points:
        return "no budget was found that does for the second step"
    lines = ["a step within other budgets, simulated:"]
    for point in points:
        lost = point.recompute_ns / max(1, trace.compute_ns)
        lines.append(f"  {format_bytes(point.budget):>11}   time lost {lost:.1%}")
    return "\n".join([*lines, f"smallest budget: --budget {smallest(points[-1].budget)}"])


def smallest(budget: Bytes) -> str:
    """As it is written on a command line: in MiB, rounded up, if it is that large."""
    return str(budget) if budget < 1 << 30 else f"{-(-budget // (1 << 20))}MiB"
