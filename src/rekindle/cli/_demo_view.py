"""Show the runs of `rekindle demo`: a live line for each run, then a table of both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from rekindle._types import Bytes
from rekindle._units import format_bytes, format_ns
from rekindle.cli._demo_training import Identical, Settings, Step, Trained


class View:
    """Shows both runs of the demo: a line for each run, then the table that compares them."""

    def __init__(self, settings: Settings, console: Console, progress: Progress) -> None:
        self.settings = settings
        self.console = console
        self.progress = progress

    def watch(self, budget: Bytes | None = None) -> Callable[[Step], None]:
        """Add a progress line for a run. Return the function that updates the line after a step."""
        title = "without a budget" if budget is None else f"within {format_bytes(budget)}"
        line = self.progress.add_task(
            title, total=self.settings.steps, loss="", speed="", memory=""
        )
        self.progress.refresh()

        def update(step: Step) -> None:
            self.progress.update(
                line,
                advance=1,
                loss=f"{step.loss:.3f}",
                speed=f"{self.settings.tokens / step.ns * 1e9:,.0f}",
                memory=format_bytes(step.peak),
            )
            self.progress.refresh()

        return update

    def compare(self, free: Trained, tight: Trained, same: Identical) -> None:
        """Print a table that compares the run without a budget and the run within one."""
        table = Table("", box=SIMPLE_HEAD, pad_edge=False)
        for title in ("without a budget", "with a budget", "ratio"):
            table.add_column(title, justify="right")
        for row in _rows(free, tight):
            table.add_row(*row)
        table.add_section()
        for name, equal in (("final weights", same.weights), ("all losses", same.losses)):
            said = "[green]identical[/]" if equal else "[bold red]different[/]"
            table.add_row(name, "", said)
        self.console.print(table)
        self.console.print(
            "Constants: weights, gradients, optimizer state, text. Time per step: the median.",
            style="dim",
        )


def _rows(free: Trained, tight: Trained) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows: name of a figure, its value without and with a budget, the ratio."""
    yield "budget", "none", format_bytes(tight.budget or 0)
    yield "peak memory", *_both(format_bytes, free.peak, tight.peak)
    yield "- constants", *_both(format_bytes, free.constants, tight.constants)
    yield "time per step", *_both(format_ns, free.step_ns, tight.step_ns)
    steps = len(tight.steps)
    yield "evictions per step", "0", f"{tight.evictions / steps:,.0f}"
    yield "recomputations per step", "0", f"{tight.recomputations / steps:,.0f}"
    yield "last loss", *(f"{run.steps[-1].loss:.6f}" for run in (free, tight))


def _both(shown: Callable[[int], str], one: int, other: int) -> tuple[str, str, str]:
    return shown(one), shown(other), f"{other / max(one, 1):.2f}"


@contextmanager
def live(settings: Settings, *, quiet: bool) -> Generator[View]:
    """Open a `View` while the context is open.

    On a terminal the lines of the view are updated in place; elsewhere they are printed at the end.
    """
    console = Console(quiet=quiet, highlight=False)
    progress = Progress(
        TextColumn("{task.description:<17}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:<5}"),
        TextColumn("{task.fields[speed]:>6} tokens/s"),
        TextColumn("{task.fields[memory]:>10}"),
        console=console,
        auto_refresh=False,  # a drawing thread would disturb the timing of steps
    )
    console.print(
        f"A GPT of {settings.layers} layers learns Python's standard library: "
        f"{settings.tokens:,} characters a step."
    )
    with progress:
        yield View(settings, console, progress)
