"""Draw charts as inline SVG that stretches to the width of the page.

Labels are HTML text outside the SVG, so that they keep a readable size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 1000, 300
"""Size of a chart's drawing in SVG units; the browser stretches the drawing."""

Labels = Sequence[tuple[float, str]]
"""Labels of an axis: for each its position, from 0 (start of the axis) to 1, and its text."""


def stacked(
    x: Sequence[int], bands: Mapping[str, Sequence[int]], top: int, colors: Mapping[str, str]
) -> str:
    """Draw stacked areas.

    Args:
        x: The x coordinates of all points.
        bands: The heights of each area at these points; the first area is at the bottom.
        top: The height of the drawing.
        colors: The color of each area.
    """
    across = _scale(x[0], x[-1])
    lower = [0] * len(x)
    shapes: list[str] = []
    for name, values in bands.items():
        upper = [below + value for below, value in zip(lower, values, strict=True)]
        there, back = (
            [f"{across(at):.1f},{_up(value, top):.1f}" for at, value in zip(x, edge, strict=True)]
            for edge in (upper, lower)
        )
        points = " ".join([*there, *reversed(back)])
        title = f"<title>{escape(name)}</title>"
        shapes.append(f'<polygon points="{points}" fill="{colors[name]}">{title}</polygon>')
        lower = upper
    return "".join(shapes)


def bars(x: Sequence[int], heights: Sequence[int], color: str, title: str) -> str:
    """Draw thin bars; the highest one fills the height of the drawing."""
    most = max(heights, default=0)
    if not most:
        return ""
    across = _scale(x[0], x[-1])
    width = max(1.5, WIDTH / len(x))
    drawn = "".join(
        f'<rect x="{across(at) - width / 2:.1f}" y="{_up(height, most):.1f}" width="{width:.1f}" '
        f'height="{HEIGHT * height / most:.1f}"/>'
        for at, height in zip(x, heights, strict=True)
        if height
    )
    return f'<g fill="{color}"><title>{escape(title)}</title>{drawn}</g>'


def line(points: Sequence[tuple[float, float]], color: str) -> str:
    """Draw a line through points between (0, 0), the lower left corner, and (1, 1)."""
    path = " ".join(f"{WIDTH * x:.1f},{HEIGHT * (1 - y):.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>'


def level(y: float) -> str:
    """Draw a dashed horizontal line at `y` (0 to 1)."""
    return _dashed(0, WIDTH, HEIGHT * (1 - y), HEIGHT * (1 - y))


def upright(x: float) -> str:
    """Draw a dashed vertical line at `x` (0 to 1)."""
    return _dashed(WIDTH * x, WIDTH * x, 0, HEIGHT)


def _dashed(x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="level" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def shaded(left: float, right: float, title: str) -> str:
    """Shade the region from `left` to `right` (0 to 1), to mark it as impossible."""
    return (
        f'<rect class="shaded" x="{WIDTH * left:.1f}" width="{WIDTH * (right - left):.1f}" y="0" '
        f'height="{HEIGHT}"><title>{escape(title)}</title></rect>'
    )


def chart(drawing: str, *, x: Labels, y: Labels, label: str, kind: str = "") -> str:
    """Return a drawing with its axes.

    Args:
        drawing: The SVG elements.
        x: The labels of the x axis.
        y: The labels of the y axis.
        label: The text for screen readers.
        kind: A further CSS class.
    """
    rules = "".join(f'<i style="bottom:{100 * at:.2f}%"></i>' for at, _ in y)
    left = "".join(f'<b style="bottom:{100 * at:.2f}%">{escape(text)}</b>' for at, text in y)
    below = "".join(
        f'<b{" class=last" if at > 0.9 else ""} style="left:{100 * at:.2f}%">{escape(text)}</b>'
        for at, text in x
    )
    return (
        f'<div class="chart {kind}"><div class="y">{left}</div><div class="plot">{rules}'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{drawing}</svg></div><div class="x">{below}</div></div>'
    )


def ticks(top: float, unit: float, shown: Callable[[int], str], *, most: int = 5) -> Labels:
    """Return labels at round multiples of `unit` from 0 to `top`, about `most` of them."""
    if top <= 0:
        return [(0.0, shown(0))]
    rough = max(top / most / unit, 1e-9)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough) * unit
    return [(n * step / top, shown(round(n * step))) for n in range(int(top / step + 1e-9) + 1)]


def _scale(first: int, last: int) -> Callable[[int], float]:
    length = max(1, last - first)
    return lambda at: WIDTH * (at - first) / length


def _up(value: int, top: int) -> float:
    return HEIGHT * (1 - value / max(1, top))
