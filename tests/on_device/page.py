"""Write the findings as one self-contained page."""

from __future__ import annotations

from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
td, th { border: 1px solid #ccc; padding: .15rem .5rem; text-align: left; vertical-align: top }
.no { background: #fdd }
"""


def failed(findings: list[dict[str, Any]]) -> list[str]:
    """Return the failed checks and the stages that did not end."""
    wrong = [f"{each['stage']}: {each['ended']}" for each in findings if each["ended"]]
    for each in findings:
        wrong += [line["check"] for line in each["lines"] if line.get("ok") is False]
    return wrong


def page(findings: list[dict[str, Any]]) -> str:
    """Return HTML: a summary, then for each stage a table of checks and one of figures."""
    parts = [_verdict(findings), *(_stage(each) for each in findings)]
    head = f'<meta charset="utf-8"><title>On a device</title><style>{_STYLE}</style>'
    body = f"<body><h1>On a device</h1>{''.join(parts)}</body>"
    return f"<!doctype html><html><head>{head}</head>{body}</html>\n"


def _verdict(findings: list[dict[str, Any]]) -> str:
    checks = [line for each in findings for line in each["lines"] if "check" in line]
    good = sum(line["ok"] for line in checks)
    items = "".join(f'<li class="no">{escape(each)}</li>' for each in failed(findings))
    return f"<p>{good} of {len(checks)} checks hold.</p>" + (f"<ul>{items}</ul>" if items else "")


def _stage(found: dict[str, Any]) -> str:
    checks = [line for line in found["lines"] if "check" in line]
    figures = [line for line in found["lines"] if "check" not in line and [*line] != ["seconds"]]
    ended = found["ended"] or f"{found['seconds']} s"
    title = f"<h2>{escape(found['stage'])} {escape(found['setting'])} ({escape(ended)})</h2>"
    said = f"<pre>{escape(found['stderr'])}</pre>" if found["stderr"] else ""
    return title + _tables(figures) + _tables(checks) + said


def _tables(lines: list[dict[str, Any]]) -> str:
    """Return one table for each kind of line, where lines of a kind have the same keys."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(tuple(line), []).append(line)
    return "".join(_table(keys, rows) for keys, rows in kinds.items())


def _table(keys: tuple[str, ...], rows: list[dict[str, Any]]) -> str:
    head = "".join(f"<th>{escape(key)}</th>" for key in keys)
    body = "".join(_row(row) for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _row(row: dict[str, Any]) -> str:
    kind = ' class="no"' if row.get("ok") is False else ""
    return f"<tr{kind}>{''.join(f'<td>{escape(str(value))}</td>' for value in row.values())}</tr>"
