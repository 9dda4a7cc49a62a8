"""Line charts as SVG, written by hand: no library, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paper import DARK

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 64, 16, 40, 48
COLOURS = ("#1f6fb4", "#d95f02", "#3a8f3a", "#7b5ea7")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line; ``dashed``: a bound rather than a measurement."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def chart(
    lines: Sequence[Line], *, title: str, x: str, y: str, log_y: bool = False, most: float | None = None
) -> str:
    """Returns a chart with a logarithmic x axis.

    Args:
        lines: to draw; values <= 0 on a logarithmic axis, and values above ``most``, are left out.
        title, x, y: words.
        log_y: a logarithmic y axis, too.
        most: end of the y axis.
    """
    points = [(a, b) for line in lines for a, b in zip(line.x, line.y, strict=True) if _shown(b, log_y, most)]
    x_low, x_high = (math.log10(f(a for a, _ in points)) for f in (min, max))
    values = [math.log10(b) if log_y else b for _, b in points]
    y_low, y_high = min(values), max(values)
    if log_y:
        y_low, y_high = math.floor(y_low), math.ceil(y_high)
    else:
        step = _step(y_high - y_low)
        y_low, y_high = math.floor(y_low / step) * step, math.ceil(y_high / step) * step

    def at(a: float, b: float) -> tuple[float, float]:
        part_x = (math.log10(a) - x_low) / (x_high - x_low)
        part_y = ((math.log10(b) if log_y else b) - y_low) / (y_high - y_low)
        return LEFT + part_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - part_y * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{title}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{x}</text>',
        f'<text x="{LEFT}" y="34" fill="#555">{y}</text>',
    ]
    for power in range(math.ceil(x_low), math.floor(x_high) + 1):
        place, _ = at(10.0**power, points[0][1])
        out.append(f'<line x1="{place:.1f}" y1="{TOP}" x2="{place:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(f'<text x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{10.0**power:g}</text>')
    for mark in _marks(y_low, y_high, log_y):
        _, place = at(points[0][0], mark)
        out.append(f'<line x1="{LEFT}" y1="{place:.1f}" x2="{WIDTH - RIGHT}" y2="{place:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for i, line in enumerate(lines):
        colour, dash = COLOURS[i % len(COLOURS)], ' stroke-dasharray="6 4"' if line.dashed else ""
        shown = [at(a, b) for a, b in zip(line.x, line.y, strict=True) if _shown(b, log_y, most)]
        path_ = " ".join(f"{a:.1f},{b:.1f}" for a, b in shown)
        out.append(f'<polyline points="{path_}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed:
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in shown]
        left, down = WIDTH - RIGHT - 190, TOP + 14 + 18 * i
        ends = f'x1="{left}" y1="{down - 4}" x2="{left + 24}" y2="{down - 4}"'
        out.append(f'<line {ends} stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{left + 30}" y="{down}">{line.name}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _shown(value: float, log_y: bool, most: float | None) -> bool:
    return (value > 0.0 or not log_y) and (most is None or value <= most)


def _step(span: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(span, 1e-12)))
    return next(power * f for f in (0.2, 0.5, 1.0, 2.0) if span / (power * f) <= 7)


def _marks(low: float, high: float, log_y: bool) -> list[float]:
    if log_y:
        return [10.0**power for power in range(round(low), round(high) + 1)]
    step = _step(high - low)
    return [round(low + k * step, 10) for k in range(math.floor((high - low) / step + 1e-6) + 1)]
