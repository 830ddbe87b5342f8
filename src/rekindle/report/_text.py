"""Format a report as aligned lines for a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from rekindle._types import Bytes
from rekindle._units import format_at_least, format_bytes, format_ns
from rekindle.report._data import Choice, Figures
from rekindle.report._tables import by_kind, recomputed_by_kind, short_path, short_paths

MOST_ROWS = 8
"""Most rows of a table; one more line tells how many rows are left out."""

_Paint = Callable[[str, str], str]
_BOLD, _DIM, _RED, _YELLOW, _CYAN = "1", "2", "31", "33", "36"


def wants_color(file: IO[str]) -> bool:
    """Return True if `file` is a terminal and the user has not set NO_COLOR or TERM=dumb.

    See https://no-color.org.
    """
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and file.isatty()


def text_of(report: Figures, *, color: bool) -> str:
    """Return all sections of the report as text, with an empty line between them."""
    paint = _paint if color else _plain
    sections = [
        _figures(report, paint),
        _peak(report, paint),
        _table("by module:", by_kind(report.at_peak.modules), report.at_peak.memory, paint),
        _table("by line:", short_paths(report.at_peak.lines), report.at_peak.memory, paint),
        _operators(report, paint),
        _recomputed(report, paint),
        _moved(report, paint),
        _table("stays in memory:", by_kind(report.staying), 0, paint),
        _choices(report, paint),
        list(report.advice),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _plain(text: str, code: str) -> str:
    return text


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


def _figures(report: Figures, paint: _Paint) -> list[str]:
    budget = format_bytes(report.budget) if report.budget else "none"
    share = f"   {report.peak / report.budget:.1%} of budget" if report.budget else ""
    lost = f"{format_ns(report.time_lost):>11}   {report.overhead:.1%} of the computation"
    rows = [
        f"budget          {budget:>11}",
        f"peak            {paint(f'{format_bytes(report.peak):>11}', _BOLD)}{share}",
        f"evictions       {report.evictions:>11}",
        f"recomputations  {report.recomputations:>11}",
        f"time lost       {paint(lost, _YELLOW) if report.time_lost else lost}",
    ]
    rows += _resident(report) + _swapped(report)
    if report.smallest_budget is not None:
        part = f"   {report.smallest_budget / report.peak:.1%} of the peak" if report.peak else ""
        rows.append(f"smallest budget {format_at_least(report.smallest_budget):>11}{part}")
    if report.plain_ns is not None:
        name = f"plain {report.measured}"
        rows.append(f"{name:<15} {format_ns(report.plain_ns):>11}   without Rekindle")
    return rows


def _resident(report: Figures) -> list[str]:
    """Return the lines about the resident memory of the process near the peak of the budget."""
    peak = report.at_peak
    if not peak.resident:
        return []
    parts = [f"{format_bytes(peak.memory)} counted"]
    parts += [f"{format_bytes(peak.cached)} free"] if peak.cached else []
    beside = max(0, peak.resident - peak.memory - peak.cached)
    parts.append(f"{format_bytes(beside)} Python and libraries")
    return [f"resident        {format_bytes(peak.resident):>11}   {', '.join(parts)}"]


def _swapped(report: Figures) -> list[str]:
    swapped = report.swapped
    if swapped is None:
        return []
    hidden = format_ns(max(0, swapped.transfer_ns - swapped.waiting_ns))
    at_once = format_bytes(swapped.host_peak)
    return [
        f"swapped out     {format_bytes(swapped.out):>11}   at most {at_once} on the host at once",
        f"swapped in      {format_bytes(swapped.back):>11}",
        f"copy waits      {format_ns(swapped.waiting_ns):>11}   {hidden} of copying were hidden",
    ]


def _peak(report: Figures, paint: _Paint) -> list[str]:
    peak = report.at_peak
    if not peak.categories:
        return []
    at = f", at {short_path(peak.where)}" if peak.where else ""
    title = f"near the peak ({format_bytes(peak.memory)}, after {format_ns(peak.clock)}{at}):"
    return [paint(title, _BOLD), *_rows(peak.categories, peak.memory, paint)]


def _operators(report: Figures, paint: _Paint) -> list[str]:
    operators = report.at_peak.operators
    if not operators:
        return []
    return [paint("by operator:", _BOLD), *_rows(operators, 0, paint)]


def _table(title: str, table: Mapping[str, Bytes], whole: Bytes, paint: _Paint) -> list[str]:
    return [paint(title, _BOLD), *_rows(table, whole, paint)] if table else []


def _rows(table: Mapping[str, Bytes], whole: Bytes, paint: _Paint) -> Iterator[str]:
    shown = list(table.items())[:MOST_ROWS]
    rest = len(table) - len(shown)
    width = max(len(name) for name, _ in shown)
    for name, nbytes in shown:
        share = f"  {nbytes / whole:>6.1%}" if whole else ""
        yield f"  {name:<{width}}  {paint(f'{format_bytes(nbytes):>11}', _CYAN)}{share}"
    if rest:
        left = sum(table.values()) - sum(nbytes for _, nbytes in shown)
        yield paint(f"  and {rest} more: {format_bytes(left)}", _DIM)


def _recomputed(report: Figures, paint: _Paint) -> list[str]:
    if not report.recomputed:
        return []
    rows = recomputed_by_kind(report.recomputed)
    shown = rows[:MOST_ROWS]
    module = max(len(row.module) for row in shown)
    operator = max(len(row.operator) for row in shown)
    lines = [paint("recomputed, by module and operator:", _BOLD)]
    for row in shown:
        time = paint(f"{format_ns(row.ns):>9}", _YELLOW)
        lines.append(
            f"  {row.module:<{module}}  {row.operator:<{operator}}  {row.times:>5} x {time}"
        )
    rest = rows[MOST_ROWS:]
    if rest:
        time = format_ns(sum(row.ns for row in rest))
        lines.append(paint(f"  and {len(rest)} more: {time}", _DIM))
    return lines


def _moved(report: Figures, paint: _Paint) -> list[str]:
    if not report.moved:
        return []
    width = max(len(row.kind) for row in report.moved)
    lines = [paint("copied to the host and back:", _BOLD)]
    for row in report.moved:
        out, back = (
            f"{times:>6} x {paint(f'{format_bytes(nbytes):>11}', _CYAN)} {way}"
            for times, nbytes, way in (
                (row.times_out, row.out, "out"),
                (row.times_back, row.back, "in"),
            )
        )
        lines.append(f"  {row.kind:<{width}}  {out}  {back}")
    return lines


def _choices(report: Figures, paint: _Paint) -> list[str]:
    if not report.choices:
        return []
    most = max(choice.slowdown for choice in report.choices)
    whole = report.keep_all or report.peak
    moves = any(choice.host for choice in report.choices)
    lines: list[str] = []
    known = ""
    for choice in _thinned(report.choices):
        before, known = known, "measured" if choice.measured else "predicted"
        if known != before:
            lines.append(paint(f"{known} time of a {report.measured} within a budget:", _BOLD))
        bar = "=" * round(24 * choice.slowdown / most)
        host = f"{format_bytes(choice.host):>11} on the host  " if moves else ""
        lines.append(
            f"  {format_bytes(choice.budget):>11}  {choice.budget / whole:>5.0%} of all  {host}"
            f"{format_ns(choice.step_ns):>9}  {choice.slowdown:>5.2f} x  {paint(bar, _CYAN)}"
        )
    return lines


def _thinned(choices: Sequence[Choice]) -> list[Choice]:
    """Select at most twelve of the budgets, including the first and the last."""
    step = max(1, -(-(len(choices) - 1) // 11))
    return list(choices) if step == 1 else [*choices[:-1:step], choices[-1]]
