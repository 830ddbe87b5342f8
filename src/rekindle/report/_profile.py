"""Define `Profile`, the result of `rekindle.profile`: a measured step, and smaller budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any, final

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument, OutOfBudget
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, parse_bytes
from rekindle.report._data import Choice, Holders
from rekindle.report._report import Report
from rekindle.trace import Trace


@final
@dataclass(frozen=True, slots=True)
class Profile:
    """A measured step, and its predicted or measured time within smaller budgets.

    Attributes:
        report: Uses of the memory at the peak, memory over time, time against budget.
        trace: The trace of the step, for `rekindle.simulate` and the planners.
        noise: The time by which the slowest repetition of the step exceeded the fastest one, as a
            fraction.
    """

    report: Report
    trace: Trace
    noise: float = 0.0

    @property
    def peak(self) -> Bytes:
        """The most bytes in use during the step."""
        return self.report.peak

    @property
    def at_peak(self) -> Holders:
        """Uses of the memory at the peak: by category, module, source line and operator."""
        return self.report.at_peak

    @property
    def smallest_budget(self) -> Bytes:
        """The smallest budget (bytes) within which the step runs: simulated, or measured."""
        return self.report.smallest_budget or self.peak

    @property
    def curve(self) -> tuple[Choice, ...]:
        """Budgets with the time of a step within each budget, the largest budget first.

        The time is predicted, or measured if `measured` is set. A smaller budget is never faster
        than a larger one.
        """
        return self.report.choices

    def step_ns(self, budget: str | Bytes) -> Nanoseconds:
        """Return the time of a step (ns), interpolated on the curve.

        Args:
            budget: Bytes, or text such as "6GiB".

        Raises:
            OutOfBudget: `budget` is below `smallest_budget`.
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
        """Return the slowdown of a step: 1.1 means 10 % more time than without Rekindle.

        Args:
            budget: Bytes, or text such as "6GiB".
        """
        first = self.curve[0]
        return first.slowdown * self.step_ns(budget) / first.step_ns

    def budget_for(self, slowdown: float = 1.1) -> Bytes:
        """Return the smallest budget (bytes) within which a step is fast enough.

        Args:
            slowdown: The most time that a step may take, as a multiple of its time without
                Rekindle. At least 1.0.

        Raises:
            InvalidArgument: Even within the largest budget a step takes longer.
        """
        checks.number(slowdown, 1.0, "profile.budget_for(slowdown={})", "1.1")
        fast = [choice for choice in self.curve if choice.slowdown <= slowdown]
        if not fast:
            raise self._too_fast(slowdown)
        last = fast[-1]
        following = self.curve[len(fast) :]
        if not following:
            return last.budget
        beyond = following[0]
        share = (slowdown - last.slowdown) / (beyond.slowdown - last.slowdown)
        return int(last.budget - share * (last.budget - beyond.budget))

    def fits(self, budget: str | Bytes) -> bool:
        """Return True if the step runs within a budget: one of at least `smallest_budget`.

        Args:
            budget: Bytes, or text such as "6GiB".
        """
        return parse_bytes(budget, line="profile.fits({})") >= self.smallest_budget

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return the report as one page that needs no network and no other file.

        Args:
            path: Also write the page to this file.
        """
        return self.report.to_html(path)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return the report as JSON.

        Args:
            path: Also write the JSON to this file, for `rekindle report`.
        """
        return self.report.to_json(path)

    def _too_fast(self, slowdown: float) -> InvalidArgument:
        """Return the error for a slowdown that no budget reaches, even without evictions."""
        first = self.curve[0]
        enough = math.ceil(round(100 * first.slowdown, 6)) / 100
        why = (
            f"the measurements are noisy: the same step took up to {self.noise:.0%} longer in one "
            "repetition than in another"
            if self.noise >= first.slowdown - slowdown
            else "Rekindle's bookkeeping takes that long"
        )
        return InvalidArgument(
            f"profile.budget_for(slowdown={slowdown}): wanted at least {first.slowdown:.3f}, the "
            f"figure without any eviction, within rekindle.budget({first.budget}); {why}; write "
            f"profile.budget_for(slowdown={enough:.2f})"
        )

    def _too_little(self, wanted: Bytes) -> OutOfBudget:
        return OutOfBudget(
            f"got a budget of {format_bytes(wanted)}, wanted at least "
            f"{format_bytes(self.smallest_budget)} for this step; write "
            f"rekindle.budget({self.smallest_budget})",
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
        """Print the report, in color if standard output is a terminal."""
        self.report.show()

    def __str__(self) -> str:
        return self.report.text()
