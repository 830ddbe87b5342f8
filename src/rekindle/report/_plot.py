"""Draw plots with matplotlib and save them to files. Only this file imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
"""Palette that color-blind people can distinguish (Okabe and Ito)."""


def grid(count: int, *, columns: int = 3, width: float = 4.0, height: float = 3.0) -> Any:
    """Return a matplotlib figure and its `count` axes, arranged in rows."""
    from matplotlib.figure import Figure

    rows = -(-count // columns)
    columns = min(columns, count)
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, position + 1) for position in range(count)]
    return figure, axes


def line(
    axis: Any, x: Sequence[float], y: Sequence[float], *, label: str, number: int, style: str = "-"
) -> None:
    color = COLORS[number % len(COLORS)]
    marker = "os^vDPX*"[number % 8]
    axis.plot(x, y, style, label=label, color=color, marker=marker, markersize=4, linewidth=1.4)


def failure(axis: Any, x: float, *, number: int, style: str) -> None:
    """Draw a vertical line at `x`, the smallest budget with which a policy succeeds."""
    axis.axvline(x, color=COLORS[number % len(COLORS)], linestyle=style, linewidth=0.9, alpha=0.7)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path)


def time_against_memory(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    bound: Sequence[tuple[float, float]],
    path: Path,
    *,
    title: str,
) -> None:
    """Draw the overhead of each planner against the budget, with the lower bound.

    Args:
        curves: For each planner, points (budget over the peak without evictions, overhead).
        bound: Points (budget over the peak without evictions, lower bound of the overhead).
        path: The file to write.
        title: The title of the plot.
    """
    figure, (axes,) = grid(1, width=8, height=5)
    for number, (name, points) in enumerate(curves.items()):
        if points:
            ordered = sorted(points)
            axes.plot(
                [ratio for ratio, _ in ordered],
                [100 * overhead for _, overhead in ordered],
                marker="osv^<>DXP*"[number % 10],
                label=name,
            )
    ordered = sorted(bound)
    axes.plot(
        [ratio for ratio, _ in ordered],
        [100 * overhead for _, overhead in ordered],
        color="black",
        linestyle="--",
        label="lower bound",
    )
    axes.set_xlabel("budget / peak of keep-all")
    axes.set_ylabel("recomputation, % of running once")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)
