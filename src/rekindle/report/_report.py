"""What a run did, ready to be shown as text, as a page, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, final

from rekindle.report._data import Figures
from rekindle.report._derive import recomputed, timeline
from rekindle.report._html import fragment, page
from rekindle.report._json import read, write
from rekindle.report._text import text_of, wants_color
from rekindle.schedule import Record
from rekindle.trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Report(Figures):
    """What a run did: budget, peak, who held memory, what was recomputed and at what price.

    Bytes and nanoseconds are integers. `print(report)` shows it as text, `report.show()` in color
    on a terminal; a notebook shows the page that `report.to_html()` returns.
    """

    def over_time(
        self, trace: Trace, record: Record, *, kinds: Sequence[str], modules: Sequence[str]
    ) -> Report:
        """This report with a timeline, and the table of what ran again.

        kinds: the category of each storage of `trace`; modules: the place of each of its operators.
        """
        return replace(
            self,
            timeline=timeline(trace, record, kinds),
            recomputed=recomputed(trace, record, modules),
        )

    def text(self, *, color: bool = False) -> str:
        """The report in lines for a terminal, with its color codes if wanted."""
        return text_of(self, color=color)

    def show(self, file: IO[str] | None = None) -> None:
        """Prints the text, in color if `file` (default: standard output) is a terminal."""
        out = sys.stdout if file is None else file
        print(self.text(color=wants_color(out)), file=out)

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no other file."""
        return page(self)

    def to_json(self) -> str:
        """Everything in the report; `Report.from_json` reads it."""
        return write(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What `to_json` wrote. Raises `InvalidFile` for anything else."""
        return cls(**read(text))

    def _repr_html_(self) -> str:
        return fragment(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text())

    def __str__(self) -> str:
        return self.text()
