"""Draw the figures of the DTR paper (Kirisame et al., ICLR 2021) from simulated runs.

`rekindle paper` and `rekindle simulate --plots` call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    def dead(self) -> str: ...
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


def _policy(point: Point) -> str:
    return point.policy


def overheads(
    points: Sequence[Point], path: Path, *, label: Callable[[Point], str] = _policy
) -> None:
    """Draw figure 2 of the paper: overhead against memory ratio, one panel for each model.

    The memory ratio is the budget over the peak without evictions. If a run has no ratio, its own
    peak takes the place of the budget. A line ends at the lowest ratio that works. A dotted
    vertical line at its end means that the next lower budget is too small. A dashed one means that
    within the next lower budget the policy recomputes too long.

    Args:
        points: The simulated runs.
        path: The file to write.
        label: A function from a run to the name of its line. Default: the policy.
    """
    logs = list(dict.fromkeys(point.log for point in points))
    labels = list(dict.fromkeys(label(point) for point in points))
    figure, axes = _plot.grid(len(logs))
    for log, axis in zip(logs, axes, strict=True):
        for number, wanted in enumerate(labels):
            mine = [point for point in points if point.log == log and label(point) == wanted]
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
    """Return the runs before the first one that failed, and that failed run, or None.

    The runs are sorted by budget, the largest first.
    """
    passed: list[Point] = []
    for point in points:
        if point.status != "pass":
            return passed, point
        passed.append(point)
    return passed, None


def bars(
    counts: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path, *, what: str
) -> None:
    """Draw counts against the memory ratio, with a logarithmic axis for the counts.

    Args:
        counts: For each model and policy, points (ratio, count).
        path: The file to write.
        what: The label of the axis of counts.
    """
    figure, axes = _plot.grid(len(counts))
    for (log, by_policy), axis in zip(counts.items(), axes, strict=True):
        for number, (policy, points) in enumerate(by_policy.items()):
            x, y = [point[0] for point in points], [point[1] for point in points]
            _plot.line(axis, x, y, label=policy, number=number)
        axis.set(title=log, xlabel="memory ratio", ylabel=what, yscale="log")
        axis.invert_xaxis()
    axes[0].legend(fontsize="x-small")
    _plot.save(figure, path)


def theory(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x: str,
    y: str,
    bounds: Sequence[str] = (),
) -> None:
    """Draw curves over problem sizes or budgets, both axes logarithmic.

    Args:
        lines: The points of each curve, by label.
        path: The file to write.
        title: The title of the plot.
        x: The label of the x axis.
        y: The label of the y axis.
        bounds: The labels of the curves that are drawn dashed.
    """
    figure, (axis,) = _plot.grid(1, width=6.0, height=4.5)
    for number, (label, points) in enumerate(lines.items()):
        style = "--" if label in bounds else "-"
        _plot.line(
            axis,
            [p[0] for p in points],
            [p[1] for p in points],
            label=label,
            number=number,
            style=style,
        )
    axis.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    axis.legend(fontsize="small")
    _plot.save(figure, path)
