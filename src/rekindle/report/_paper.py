"""Draw figure 2 of the DTR paper (Kirisame et al., ICLR 2021) from simulated runs.

`rekindle simulate --plots` calls this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rekindle.report import _plot


class Point(Protocol):
    """Figures of one simulated run, such as an `Outcome` of the simulator."""

    @property
    def log(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def ratio(self) -> float | None: ...
    @property
    def status(self) -> str: ...
    @property
    def overhead(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def keep_all_bytes(self) -> int: ...


def overheads(points: Sequence[Point], path: Path) -> None:
    """Draw figure 2 of the paper: overhead against memory ratio, one panel for each model.

    The memory ratio is the budget divided by the peak without evictions. If a run has no ratio, its
    own peak replaces the budget. A line ends at the lowest ratio that works. A vertical line at
    this end says why the next lower budget failed. Dotted: it is too small. Dashed: the policy
    recomputes for too long.

    Args:
        points: The simulated runs.
        path: The file to write.
    """
    logs = list(dict.fromkeys(point.log for point in points))
    policies = list(dict.fromkeys(point.policy for point in points))
    figure, axes = _plot.grid(len(logs))
    for log, axis in zip(logs, axes, strict=True):
        for number, wanted in enumerate(policies):
            mine = [point for point in points if point.log == log and point.policy == wanted]
            mine.sort(key=_ratio, reverse=True)
            passed, failed = _split(mine)
            _plot.line(
                axis,
                [_ratio(point) for point in passed],
                [point.overhead for point in passed],
                label=wanted,
                number=number,
            )
            if failed is not None and passed:
                style = ":" if failed.status == "oom" else "--"
                _plot.failure(axis, _ratio(passed[-1]), number=number, style=style)
        axis.set(title=log, xlabel="memory ratio", ylabel="overhead (x)", ylim=(0.97, 2.0))
        axis.invert_xaxis()
    axes[0].legend(fontsize="x-small")
    _plot.save(figure, path)


def _ratio(point: Point) -> float:
    return point.ratio or point.peak_bytes / point.keep_all_bytes


def _split(points: Sequence[Point]) -> tuple[list[Point], Point | None]:
    """Return the runs before the first failed run, and that failed run, or None.

    The runs are sorted by budget, the largest first.
    """
    passed: list[Point] = []
    for point in points:
        if point.status != "pass":
            return passed, point
        passed.append(point)
    return passed, None
