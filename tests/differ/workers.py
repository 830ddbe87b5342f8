"""Run programs in processes of their own.

A program that hangs, exhausts memory or ends its process is a complaint about this program, and the
next one runs in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from tests.differ.tally import Tally

ROOT = Path(__file__).parents[2]
ROWS = "REKINDLE_DIFFER_ROWS"  # environment variable: the file for a process's rows
#: One thread, so that results have equal bits, and no downloads.
QUIET = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Ended(NamedTuple):
    """The rows that a process wrote, and how it ended."""

    rows: list[dict[str, Any]]
    status: int | None  #: None if the process took too long
    output: str
    text: str  #: says how it ended

    @property
    def begun(self) -> Any:
        """Return the item that began last, or None."""
        return next((row["begins"] for row in reversed(self.rows) if "begins" in row), None)


def write_row(row: dict[str, Any]) -> None:
    """Report to the process that started this one, or else print."""
    if ROWS not in os.environ:
        click.echo(json.dumps(row))
        return
    with Path(os.environ[ROWS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def run(
    command: Sequence[object], seconds: float, environment: Mapping[str, str], folder: Path = ROOT
) -> Ended:
    """Run a process that writes rows, at most so many seconds."""
    with tempfile.TemporaryDirectory() as there:
        rows = Path(there) / "rows"
        rows.touch()
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=folder,
            env={**os.environ, **QUIET, ROWS: str(rows), **environment},
        )  # fmt: skip
        status = None
        try:
            output, error = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            output, error = process.communicate()
        lines = rows.read_text(encoding="utf-8").splitlines()
    _, fatal, where = error.partition("Fatal Python error")
    told = (fatal + where)[:1500] if fatal else error.strip()[-1500:]
    text = f"not done after {seconds:.0f} s" if status is None else f"ended with {status}: {told}"
    return Ended([json.loads(line) for line in lines], status, output, text)


@dataclass(frozen=True)
class Work:
    """Items, each a seed or a name, that processes judge.

    Attributes:
        judge: Judges one item.
        items: All items.
        words: The command line of a process that judges some of the items in itself.
        portion: How many items a process judges.
        seconds: Time for an item, on a busy machine.
    """

    judge: Callable[[Any], Tally]
    items: Sequence[Any]
    words: Callable[[Sequence[Any]], list[str]]
    portion: int = 25
    seconds: float = 600.0

    def here(self) -> None:
        """Judge the items in this process, and write a row for each."""
        import torch

        from tests.differ.judge import collect_little

        torch.set_num_threads(1)
        collect_little()
        for item in self.items:
            write_row({"begins": item})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = self.judge(item).as_row()
            write_row({"item": item, **row})

    def there(self, processes: int = 1, log: Path | None = None) -> Tally:
        """Judge the items in processes; print complaints, and the progress after each process."""
        total, done, began = Tally(), 0, time.monotonic()
        parts = range(0, len(self.items), self.portion)
        with ThreadPoolExecutor(processes) as pool:
            running = [
                pool.submit(lambda part: [*self._judged(part)], self.items[at : at + self.portion])
                for at in parts
            ]
            for future in as_completed(running):
                for found in future.result():
                    total += found
                    done += 1
                    for failure in found.failures:
                        click.echo(f"FAILED {failure}", err=True)
                        if log is not None:
                            with log.open("a", encoding="utf-8") as file:
                                file.write(f"{failure}\n")
                took = time.monotonic() - began
                click.echo(
                    f"{done} of {len(self.items)}: {dict(total.kinds)}, {took:.0f} s", err=True
                )
        return total

    def _judged(self, items: Sequence[Any]) -> Iterator[Tally]:
        items = [*items]
        while items:
            seconds = self.seconds * (1 + len(items) / 4)
            ended = run(["-m", "tests.differ", *self.words(items), "--here"], seconds, {})
            for row in ended.rows:
                if "item" in row:
                    items.remove(row.pop("item"))
                    yield Tally.of_row(row)
            if items:
                failure = f"{items.pop(0)}: {ended.text}"
                yield Tally(Counter(different=1), failures=[failure])
