"""What a step needs and what it would cost with less: the answer of `rekindle.profile`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any, final

from rekindle import _checks as checks
from rekindle._errors import OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, parse_bytes
from rekindle.report._data import Choice, Holders
from rekindle.report._report import Report
from rekindle.trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Profile:
    """A step, measured, and what it would take within other budgets, simulated.

    report: who held memory at the peak, the timeline, the curve; print it, or save it as a page.
    trace: what the step did, for `rekindle.simulate` and the planners.
    """

    report: Report
    trace: Trace

    @property
    def peak(self) -> Bytes:
        """The most memory that the step had in use, in bytes."""
        return self.report.peak

    @property
    def at_peak(self) -> Holders:
        """Who held it, by category, module, line and operator."""
        return self.report.at_peak

    @property
    def smallest_budget(self) -> Bytes:
        """The smallest budget (bytes) with which the simulator gets through the step."""
        return self.report.smallest_budget or self.peak

    @property
    def curve(self) -> tuple[Choice, ...]:
        """Predicted time of a step against budget, from the largest budget to the smallest.

        Monotone: a smaller budget is never predicted to be faster.
        """
        return self.report.choices

    def step_ns(self, budget: str | Bytes) -> Nanoseconds:
        """The predicted time of a step (ns) within `budget`, interpolated on the curve.

        Raises `OutOfBudget` below the smallest feasible budget.
        """
        wanted = parse_bytes(budget, line="profile.step_ns({})")
        if wanted < self.smallest_budget:
            raise self._too_little(wanted)
        for more, less in pairwise(self.curve):
            if less.budget <= wanted <= more.budget:
                share = (more.budget - wanted) / max(1, more.budget - less.budget)
                return int(more.step_ns + share * (less.step_ns - more.step_ns))
        return self.curve[0].step_ns if wanted > self.curve[0].budget else self.curve[-1].step_ns

    def slowdown(self, budget: str | Bytes) -> float:
        """The predicted time of a step within `budget` over its time without Rekindle."""
        first = self.curve[0]
        return first.slowdown * self.step_ns(budget) / first.step_ns

    def budget_for(self, slowdown: float = 1.1) -> Bytes:
        """The smallest budget (bytes) with which a step is predicted to take at most `slowdown`
        times as long as without Rekindle; raises `ValueError` if none is."""
        checks.number(slowdown, 0.0, "profile.budget_for(slowdown={})", "1.1")
        fast = [choice for choice in self.curve if choice.slowdown <= slowdown]
        if not fast:
            least = self.curve[0].slowdown
            enough = math.ceil(round(100 * least, 6)) / 100
            raise ValueError(
                f"profile.budget_for(slowdown={slowdown}): wanted at least {least:.3f}, which the "
                "bookkeeping alone takes, with nothing evicted; write "
                f"profile.budget_for(slowdown={enough:.2f})"
            )
        last = fast[-1]
        following = self.curve[len(fast) :]
        if not following:
            return last.budget
        beyond = following[0]
        share = (slowdown - last.slowdown) / (beyond.slowdown - last.slowdown)
        return int(last.budget - share * (last.budget - beyond.budget))

    def fits(self, budget: str | Bytes) -> bool:
        """Whether the step runs within `budget`, as far as the simulator can tell."""
        return parse_bytes(budget, line="profile.fits({})") >= self.smallest_budget

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """One page that needs nothing else: no network, no other file. Written to `path`, too."""
        return self.report.to_html(path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The report as JSON, which `rekindle report FILE` shows. Written to `path`, too."""
        return self.report.to_json(path)

    def _too_little(self, wanted: Bytes) -> OutOfBudget:
        return OutOfBudget(
            f"{format_bytes(wanted)} are not enough for this step: it needs "
            f"{format_bytes(self.smallest_budget)}; write rekindle.budget({self.smallest_budget})",
            needed=self.smallest_budget - wanted,
            budget=wanted,
            held=self.at_peak.categories,
            smallest_budget=self.smallest_budget,
        )

    def _repr_html_(self) -> str:
        return self.report._repr_html_()  # pyright: ignore[reportPrivateUsage]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def show(self) -> None:
        """Prints the report, in color if standard output is a terminal."""
        self.report.show()

    def __str__(self) -> str:
        return self.report.text()
