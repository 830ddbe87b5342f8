"""Format the results of the benchmark `compiled` as rows of a table for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from _tables import cell

HEADS = (
    "model", "budget", "method", "time over plain", "peak over budget", "seconds",
)  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Return the rows grouped by model, those of a model from the largest budget down."""
    points = [row for row in rows if row["model"] != "depth"]
    models = list(dict.fromkeys(row["model"] for row in points))
    points.sort(key=lambda row: (models.index(row["model"]), -row["fraction"]))
    return [[row["model"], _within(row), row["way"], *_figures(row)] for row in points]


def _within(row: dict[str, Any]) -> str:
    return "" if row["way"] == "torch.compile" else f"{row['fraction']:.0%}"


def _figures(row: dict[str, Any]) -> list[str]:
    if "time" not in row:
        reported = "no plan" if "infeasible" in row else f"`{row['failed']}`"
        return [reported, "", ""]
    assert row.get("equal_to_unlimited") is not False, row  # the section says that bits are equal
    is_limited = row["way"] != "torch.compile"
    return [
        cell(row["time"]["median"]),
        f"{row['over_budget']:.3f}" if is_limited else "",
        f"{row['build_seconds']:.0f}",
    ]


def depths(rows: Iterable[dict[str, Any]]) -> str:
    """Return a sentence on the time to build plans of GPTs with few and with many blocks."""
    reported = [
        f"{row['build_seconds']:.0f} s for {row['fraction']:.0f} blocks"
        f" ({row['phases']['compiling']:.0f} s of them compilation)"
        for row in rows
        if row["model"] == "depth" and "phases" in row
    ]
    return (
        "Time to build a compiled plan of a GPT within half of the activations: "
        f"{', '.join(reported)}."
        if reported
        else ""
    )
