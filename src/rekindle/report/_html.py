"""Format a report as one HTML page, or as a fragment for a notebook.

The page contains its style and its plots, so that it needs no network and no other file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_at_least, format_bytes, format_ns
from rekindle.report import _svg
from rekindle.report._data import Figures
from rekindle.report._plot import COLORS
from rekindle.report._style import PAGE, STYLE
from rekindle.report._tables import by_kind, recomputed_by_kind, short_path, short_paths

MOST_ROWS = 14
_CATEGORIES = (
    "parameters",
    "optimizer state",
    "saved for backward",
    "gradients",
    "in use by the operator",
    "held by your code",
    "inputs and buffers",
)
_PALETTE = (*COLORS[:7], "#f0e442")  # All colors but black, which is invisible on a dark page.


def page(report: Figures) -> str:
    """Return the report as a whole HTML document."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Rekindle: {escape(report.title)}</title><style>{PAGE}</style></head>"
        f"<body>{fragment(report)}</body></html>\n"
    )


def fragment(report: Figures) -> str:
    """Return the report as HTML for a notebook, whose own style does not change."""
    peak = report.at_peak
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        _figures(report),
        _advice(report.advice),
        _section("Memory over time", _timeline(report)),
        _section("Who held the peak", _who(report)),
        _section("By module", _bars(by_kind(peak.modules), peak.memory)),
        _section("By line of your program", _bars(short_paths(peak.lines), peak.memory)),
        _section("By operator", _bars(peak.operators, peak.memory)),
        _section("What was recomputed", _recomputed(report)),
        _section("What was copied to the host and back", _moved(report)),
        _section("What stays in memory", _bars(by_kind(report.staying), 0)),
        _section("What another budget would cost", _curve(report)),
    ]
    return f'<div class="rekindle"><style>{STYLE}</style>{"".join(parts)}</div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _figures(report: Figures) -> str:
    lost = f"{report.overhead:.1%} of the computation"
    share = f"{report.peak / report.budget:.1%} of the budget" if report.budget else ""
    cards = [
        ("budget", format_bytes(report.budget) if report.budget else "none", ""),
        ("peak", format_bytes(report.peak), share),
        ("evictions", f"{report.evictions:,}", ""),
        ("recomputations", f"{report.recomputations:,}", ""),
        ("time lost", format_ns(report.time_lost), lost),
    ]
    if report.swapped is not None:
        waited = f"waited {format_ns(report.swapped.waiting_ns)} for it"
        cards.append(("swapped out", format_bytes(report.swapped.out), waited))
    if report.smallest_budget is not None:
        part = f"{report.smallest_budget / max(1, report.peak):.1%} of the peak"
        cards.append(("smallest budget", format_at_least(report.smallest_budget), part))
    if report.plain_ns is not None:
        cards.append((f"plain {report.measured}", format_ns(report.plain_ns), "without Rekindle"))
    return f'<dl class="figures">{"".join(_card(*card) for card in cards)}</dl>'


def _card(name: str, value: str, note: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"


def _advice(advice: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in advice)
    return f'<ul class="advice">{lines}</ul>' if lines else ""


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Choose a color for each name of a category.

    Each known category has the same color in all plots. Other names get the remaining colors.
    """
    fixed = dict(zip(_CATEGORIES, _PALETTE, strict=False))
    taken = {fixed[name] for name in names if name in fixed}
    left = itertools.cycle([color for color in _PALETTE if color not in taken] or _PALETTE)
    return {name: fixed[name] if name in fixed else next(left) for name in names}


def _timeline(report: Figures) -> str:
    line = report.timeline
    if len(line.clock) < 2:
        return ""
    # Categories with constant memory, such as parameters, are drawn at the bottom, so that changing
    # categories are drawn on a level base.
    names = sorted(line.bands, key=lambda name: (-min(line.bands[name]), -max(line.bands[name])))
    bands = {name: line.bands[name] for name in names}
    colors = _colors(names)
    top = int(1.05 * max(report.budget or 0, report.peak, 1))
    drawing = _svg.stacked(line.clock, bands, top, colors)
    if report.budget:
        drawing += _svg.level(report.budget / top)
    chart = _svg.chart(
        drawing,
        x=_times(line.clock[0], line.clock[-1]),
        y=_svg.ticks(top, _unit(top), format_bytes),
        label=f"memory over time, at most {format_bytes(report.peak)}",
    )
    legend = "".join(_key(colors[name], name) for name in reversed(names))
    if report.budget:
        legend += '<span><i class="dash"></i>the budget</span>'
    note = f"<p>{escape(line.note)}</p>" if line.note else ""
    return f'{chart}{_events(report)}<p class="legend">{legend}</p>{note}{_when(report)}'


def _events(report: Figures) -> str:
    line = report.timeline
    if not any(line.evicted) and not any(line.recomputed):
        return ""
    rows = [
        ("evicted", _svg.bars(line.clock, line.evicted, COLORS[1], "evicted")),
        ("recomputed", _svg.bars(line.clock, line.recomputed, COLORS[0], "recomputed")),
    ]
    return "".join(
        _svg.chart(drawing, x=(), y=((0.35, name),), label=f"when memory was {name}", kind="strip")
        for name, drawing in rows
        if drawing
    )


def _when(report: Figures) -> str:
    peak = report.at_peak
    at = f", at {escape(short_path(peak.where))}" if peak.where else ""
    return f"<p>The peak came after {format_ns(peak.clock)} of operators{at}.</p>"


def _times(first: Nanoseconds, last: Nanoseconds) -> _svg.Labels:
    unit = next((n for n in (10**9, 10**6, 10**3) if last - first >= 2 * n), 1)
    return _svg.ticks(last - first, unit, format_ns, most=4)


def _unit(top: Bytes) -> Bytes:
    return next((size for size in (2**40, 2**30, 2**20, 2**10) if top >= 2 * size), 1)


def _who(report: Figures) -> str:
    return _bars(report.at_peak.categories, report.at_peak.memory)


def _bars(table: Mapping[str, Bytes], whole: Bytes) -> str:
    """Return an HTML table with a bar for the bytes of each row, and their share of `whole` bytes.

    0: the rows are parts of no whole.
    """

    def share(nbytes: Bytes) -> str:
        return f"<td>{nbytes / whole:.1%}</td>" if whole else ""

    shown = list(table.items())[:MOST_ROWS]
    if not shown:
        return ""
    most = max(max(nbytes for _, nbytes in shown), 1)
    rows = [
        f"<tr><th>{_breakable(name)}</th>"
        f'<td class="bar"><i style="width:{100 * nbytes / most:.1f}%"></i></td>'
        f"<td>{format_bytes(nbytes)}</td>{share(nbytes)}</tr>"
        for name, nbytes in shown
    ]
    rest = sum(table.values()) - sum(nbytes for _, nbytes in shown)
    if len(table) > len(shown):
        more = f"and {len(table) - len(shown)} more"
        rows.append(
            f'<tr class="rest"><th>{more}</th><td class="bar"></td>'
            f"<td>{format_bytes(rest)}</td>{share(rest)}</tr>"
        )
    return f'<table class="bars">{"".join(rows)}</table>'


def _recomputed(report: Figures) -> str:
    rows = recomputed_by_kind(report.recomputed)
    if not rows:
        return ""
    head = "<tr><th>module</th><th>operator</th><td>times</td><td>time lost</td></tr>"
    body = [
        f"<tr><th>{_breakable(row.module)}</th><th>{_breakable(row.operator)}</th>"
        f"<td>{row.times:,}</td><td>{format_ns(row.ns)}</td></tr>"
        for row in rows[:MOST_ROWS]
    ]
    rest = rows[MOST_ROWS:]
    if rest:
        times, ns = sum(row.times for row in rest), sum(row.ns for row in rest)
        body.append(
            f'<tr class="rest"><th>and {len(rest)} more</th><th></th>'
            f"<td>{times:,}</td><td>{format_ns(ns)}</td></tr>"
        )
    return f'<table class="list"><thead>{head}</thead><tbody>{"".join(body)}</tbody></table>'


def _moved(report: Figures) -> str:
    if not report.moved:
        return ""
    titles = ("copies out", "bytes out", "copies in", "bytes in")
    head = f"<tr><th></th>{''.join(f'<td>{title}</td>' for title in titles)}</tr>"
    body = "".join(
        f"<tr><th>{escape(row.kind)}</th><td>{row.times_out:,}</td><td>{format_bytes(row.out)}</td>"
        f"<td>{row.times_back:,}</td><td>{format_bytes(row.back)}</td></tr>"
        for row in report.moved
    )
    return f'<table class="list"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _curve(report: Figures) -> str:
    choices = report.choices
    if len(choices) < 2:
        return ""
    right = max(choice.budget for choice in choices)
    least = min(choice.budget for choice in choices)
    top = 1.1 * max(choice.slowdown for choice in choices)
    points = [(choice.budget / right, choice.slowdown / top) for choice in choices]
    measured = [choice.budget for choice in choices if choice.measured]
    known = "measured" if len(measured) == len(choices) else "predicted"
    drawing = _svg.shaded(0, least / right, "does not fit")
    drawing += _svg.level(1 / top) + _svg.line(points, COLORS[0])
    if report.budget and report.budget <= right:
        drawing += _svg.upright(report.budget / right)
    chart = _svg.chart(
        drawing,
        x=_svg.ticks(right, _unit(right), format_bytes, most=4),
        y=_svg.ticks(10 * top, 1, lambda tenths: f"{tenths / 10:.1f} x"),
        label=f"{known} time of a {report.measured} against budget",
    )
    note = (
        f"{known.capitalize()} time of a {report.measured} within each budget, divided by its "
        "measured time without Rekindle. Grey: budgets that are too small, less than "
        f"{format_bytes(least)}."
    )
    if measured and known == "predicted":
        note += (
            f" Up to {format_bytes(measured[0])}, where operators run in slices, the time is "
            "measured as well."
        )
    return f"{chart}<p>{note}</p>{_table_of(report)}"


def _table_of(report: Figures) -> str:
    most = report.choices[0].budget
    rows = [
        f"<tr><th>{format_bytes(choice.budget)}</th><td>{choice.budget / most:.0%}</td>"
        f"<td>{format_ns(choice.step_ns)}</td><td>{choice.slowdown:.2f} x</td>"
        f"<td>{choice.recomputations:,}</td></tr>"
        for choice in report.choices
    ]
    titles = ("of all", report.measured, "slowdown", "recomputed")
    head = f"<tr><th>budget</th>{''.join(f'<td>{title}</td>' for title in titles)}</tr>"
    body = f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody>"
    return f'<details><summary>As a table</summary><table class="list">{body}</table></details>'


def _key(color: str, name: str) -> str:
    return f'<span><i style="background:{color}"></i>{escape(name)}</span>'


def _breakable(name: str) -> str:
    """Allow line breaks after the dots and slashes of a long path."""
    return escape(name).replace(".", ".<wbr>").replace("/", "/<wbr>")
