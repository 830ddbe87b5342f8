"""Define `Report`, which shows the figures of a run as text, as a page, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import IO, Any, final

from rekindle.report._data import Figures
from rekindle.report._derive import recomputed, timeline
from rekindle.report._html import fragment, page
from rekindle.report._json import read, write
from rekindle.report._text import text_of, wants_color
from rekindle.schedule import Record
from rekindle.trace import Trace


def written(text: str, path: str | PathLike[str] | None) -> str:
    """Write `text` to the file `path`, if `path` is not None, and return `text`."""
    if path is not None:
        Path(path).write_text(text + "\n" * (not text.endswith("\n")), encoding="utf-8")
    return text


@final
@dataclass(frozen=True, slots=True)
class Report(Figures):
    """Report of a run: budget, peak, uses of the memory, recomputed operators, time lost.

    `print(report)` shows the report as text, `report.show()` in color on a terminal. A notebook
    shows the report as a page.
    """

    def over_time(
        self, trace: Trace, record: Record, *, kinds: Sequence[str], modules: Sequence[str]
    ) -> Report:
        """Return this report with a timeline and the table of recomputed operators.

        Args:
            trace: The trace of the run.
            record: The record of the run.
            kinds: The category of each storage of `trace`.
            modules: The module of each operator of `trace`.
        """
        return replace(
            self,
            timeline=timeline(trace, record, kinds),
            recomputed=recomputed(trace, record, modules),
        )

    def text(self, *, color: bool = False) -> str:
        """Return the report as lines for a terminal.

        Args:
            color: Add the color codes of a terminal.
        """
        return text_of(self, color=color)

    def show(self, file: IO[str] | None = None) -> None:
        """Print the report, in color if the output is a terminal.

        Args:
            file: The file to print to. Default: standard output.
        """
        out = sys.stdout if file is None else file
        print(self.text(color=wants_color(out)), file=out)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return the report as one page that needs no network and no other file.

        Args:
            path: Also write the page to this file.
        """
        return written(page(self), path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return the whole report as JSON.

        Args:
            path: Also write the JSON to this file, for `rekindle report` and `from_json`.
        """
        return written(write(self), path)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report from the JSON text that `to_json` returned.

        Args:
            text: The JSON.

        Raises:
            InvalidFile: The text is not a report of this version.
        """
        return cls(**read(text))

    def _repr_html_(self) -> str:
        return fragment(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text())

    def __str__(self) -> str:
        return self.text()
