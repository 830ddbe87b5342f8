"""Format tables for docs/benchmarks.md, and the origin of each: command, machine, commit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def said(found: dict[str, Any]) -> str:
    """Return a sentence with the command, the machine and the commit."""
    machine, versions = found["machine"], found["versions"]
    return (
        f"`{found['command']}`, {machine['cpu']}, {machine['cores']} cores, "
        f"torch {versions['torch']}, commit `{found['commit'][:9]}`."
    )


def by_machine(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows grouped by processor, so that each table has the rows of one machine."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["cpu"], []).append(row)
    return found


def several_runs(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return a note that lists the commits of the rows, or [] if all have the same commit."""
    commits = dict.fromkeys(row["commit"][:10] for row in rows)
    reported = ", ".join(f"`{commit}`" for commit in commits)
    note = f"The rows were measured in several runs, at the commits {reported}."
    return [note] if len(commits) > 1 else []


def table_of(heads: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    line = "|".join(["---", *("--:" for _ in heads[1:])])
    return [
        f"| {' | '.join(map(str, heads))} |",
        f"|{line}|",
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f}-{values['max']:.2f})"
