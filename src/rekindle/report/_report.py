"""What a report is made of: plain data, ready to be shown as text, as a page, or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.schedule import Record
from rekindle.trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Holders:
    """Who holds memory at one moment, in bytes: each table adds up to `memory`, if it is known.

    clock: ns of operators since the start; where: the line that ran, as "file:line".
    """

    memory: Bytes = 0
    clock: Nanoseconds = 0
    where: str = ""
    categories: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    modules: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    lines: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])
    operators: Mapping[str, Bytes] = field(default_factory=dict[str, Bytes])


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory over a run: at `clock[i]` (ns) `bands[name][i]` bytes of each kind are in use.

    evicted: bytes let go that were brought back later, and recomputed: ns spent on that, since the
    point before.
    """

    clock: tuple[Nanoseconds, ...] = ()
    bands: Mapping[str, tuple[Bytes, ...]] = field(default_factory=dict[str, tuple[Bytes, ...]])
    evicted: tuple[Bytes, ...] = ()
    recomputed: tuple[Nanoseconds, ...] = ()


@final
@dataclass(frozen=True, slots=True)
class Recomputed:
    """Operators of one kind in one module that ran again: how often, and the time it took (ns)."""

    module: str
    operator: str
    times: int
    ns: Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """A budget (bytes), and what a step within it is predicted to take (ns).

    slowdown: against the same step without Rekindle.
    """

    budget: Bytes
    step_ns: Nanoseconds
    slowdown: float
    recompute_ns: Nanoseconds
    recomputations: int


@final
@dataclass(frozen=True, slots=True)
class Swapped:
    """What went to the host (`out`) and came `back`, in bytes, and the most that was there at once.

    transfer_ns: what that took; waiting_ns: how long the program waited for it. The rest was hidden
    behind computation.
    """

    out: Bytes = 0
    back: Bytes = 0
    host_peak: Bytes = 0
    transfer_ns: Nanoseconds = 0
    waiting_ns: Nanoseconds = 0


@final
@dataclass(frozen=True, slots=True)
class Report:
    """What a run did: budget, peak, who held memory, what was recomputed and at what price.

    Bytes and nanoseconds are integers. `print(report)` shows it as text, `report.show()` in color
    on a terminal; a notebook shows the page that `report.to_html()` returns.
    """

    budget: Bytes | None
    peak: Bytes
    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    evictions: int
    recomputations: int
    title: str = "A run within a budget"
    at_peak: Holders = Holders()
    timeline: Timeline = Timeline()
    recomputed: tuple[Recomputed, ...] = ()
    choices: tuple[Choice, ...] = ()
    keep_all: Bytes | None = None  #: the peak of a step that nothing is let go of
    smallest_budget: Bytes | None = None  #: the smallest that the simulator gets through with
    plain_ns: Nanoseconds | None = None  #: the step without Rekindle, measured
    swapped: Swapped | None = None  #: None without swapping
    advice: tuple[str, ...] = ()

    @property
    def overhead(self) -> float:
        """Recomputation over the cost of running everything once (0.0: nothing recomputed)."""
        return self.recompute_ns / self.compute_ns if self.compute_ns else 0.0

    def over_time(
        self, trace: Trace, record: Record, *, kinds: Sequence[str], modules: Sequence[str]
    ) -> Report:
        """This report with a timeline, and the table of what ran again.

        kinds: the category of each storage of `trace`; modules: the place of each of its operators.
        """
        from rekindle.report._derive import recomputed, timeline

        return replace(
            self,
            timeline=timeline(trace, record, kinds),
            recomputed=recomputed(trace, record, modules),
        )

    def text(self, *, color: bool = False) -> str:
        """The report in lines for a terminal, with its color codes if wanted."""
        from rekindle.report._text import text_of

        return text_of(self, color=color)

    def show(self, file: IO[str] | None = None) -> None:
        """Prints the text, in color if `file` (default: standard output) is a terminal."""
        from rekindle.report._text import wants_color

        out = sys.stdout if file is None else file
        print(self.text(color=wants_color(out)), file=out)

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no other file."""
        from rekindle.report._html import page

        return page(self)

    def to_json(self) -> str:
        """Everything in the report; `Report.from_json` reads it."""
        from rekindle.report._json import write

        return write(self)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What `to_json` wrote. Raises `InvalidFile` for anything else."""
        from rekindle.report._json import read

        return read(text)

    def _repr_html_(self) -> str:
        from rekindle.report._html import fragment

        return fragment(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.text())

    def __str__(self) -> str:
        return self.text()
