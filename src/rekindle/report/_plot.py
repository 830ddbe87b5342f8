"""Plots: the only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def time_against_memory(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    bound: Sequence[tuple[float, float]],
    path: Path,
    *,
    title: str,
) -> None:
    """Overhead of each planner over the budget as a share of keep-all, with the lower bound."""
    figure: Any = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
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
    figure.savefig(path)
