"""Marks on a drawing, and their colours for light and dark paper (layer P).

Colours are classes, which the page's style defines by custom properties.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_hetero.report.page.markup import Markup, element, joined

WIDTH = 420.0
"""The width of every drawing, in units: wide enough for many ranks, and legible on a phone's 360 pixels."""

RANK_COLOURS = 8
"""The number of colours; ranks beyond begin again."""

_LETTER = 7.2  # a letter's mean width at the usual size

LIGHT = {
    "paper": "#fff", "ink": "#1c2126", "mute": "#5d6770", "grid": "#e3e7ea", "cell": "#f3f5f6", "work": "#2f78b7",
    "exchange": "#e0a030", "idle": "#b9c2c9", "hot": "#c8371b", "cool": "#2f78b7", "mark": "#8a949c",
    "bound": "#c8371b", "good": "#2c8a57", "fair": "#b7791f", "poor": "#c8371b", "inside": "#fff", "r0": "#0072b2",
    "r1": "#d55e00", "r2": "#009e73", "r3": "#b0579a", "r4": "#8a6d00", "r5": "#3a9bc8", "r6": "#6b6b6b",
    "r7": "#7a3ea8",
}  # fmt: skip
DARK = {
    "paper": "#14181b", "ink": "#e8ecef", "mute": "#9aa5ad", "grid": "#2b3238", "cell": "#20262b", "work": "#5aa3de",
    "exchange": "#e8b458", "idle": "#4a545c", "hot": "#f0684a", "cool": "#5aa3de", "mark": "#76818a",
    "bound": "#f0684a", "good": "#5cc08a", "fair": "#e0aa52", "poor": "#f0684a", "inside": "#0d1113", "r0": "#4fa8dc",
    "r1": "#f08a45", "r2": "#3fc79b", "r3": "#d98ac6", "r4": "#d0b040", "r5": "#8cd0f0", "r6": "#a8b0b6",
    "r7": "#b48be0",
}  # fmt: skip


def variables(colours: dict[str, str]) -> str:
    """Returns colours as custom properties."""
    return ";".join(f"--{name}:{value}" for name, value in colours.items())


_RANKS = "\n".join(
    f".r{i}{{fill:var(--r{i});background:var(--r{i});stroke:var(--r{i})}}"
    f"rect.r{i}{{stroke:none}}.line.r{i}{{fill:none;background:none}}"
    for i in range(RANK_COLOURS)
)

MARKS = f"""\
svg text{{fill:var(--ink)}}svg text.mute{{fill:var(--mute);font-size:11px}}
svg text.inside{{fill:var(--inside);font-size:11px}}
.grid,.axis{{stroke:var(--grid);stroke-width:1}}.axis{{stroke:var(--mute)}}
.mark{{stroke:var(--mark);stroke-width:1;stroke-dasharray:2 3}}
.bound{{stroke:var(--bound);stroke-width:1.5;stroke-dasharray:6 3}}
.line{{fill:none;stroke-width:1.8;stroke-linejoin:round}}
.cell{{fill:var(--cell);background:var(--cell)}}
.work{{fill:var(--work);background:var(--work)}}.exchange{{fill:var(--exchange);background:var(--exchange)}}
.idle{{fill:var(--idle);background:var(--idle)}}.hot{{fill:var(--hot)}}.cool{{fill:var(--cool)}}
{_RANKS}
"""
"""The style of the classes that `Drawing` is given."""


def text_width(text: str) -> float:
    """Returns about how wide a text is."""
    return _LETTER * len(text)


class Drawing:
    """A drawing that grows by marks.

    Args:
        height: in units, as `WIDTH` is.
        label: what it says, for who cannot see it.
    """

    def __init__(self, height: float, label: str) -> None:
        self.height, self.label = height, label
        self._marks: list[Markup] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, *, tip: str = "", opacity: float | None = None
    ) -> None:
        """A filled rectangle; ``tip`` shows when one points at it."""
        if width <= 0.0 or height <= 0.0:
            return
        faint = "" if opacity is None else f"{opacity:.2f}"
        place = {"x": x, "y": y, "width": max(width, 0.4), "height": height}
        self._mark("rect", kind, tip, place, fill_opacity=faint)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, *, tip: str = "") -> None:
        """A straight line."""
        self._mark("line", kind, tip, {"x1": x1, "y1": y1, "x2": x2, "y2": y2})

    def path(self, points: list[tuple[float, float]], kind: str, *, tip: str = "") -> None:
        """A line through points."""
        if points:
            through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._mark("polyline", kind, tip, {}, points=through)

    def circle(self, x: float, y: float, radius: float, kind: str, *, tip: str = "") -> None:
        """A filled circle."""
        self._mark("circle", kind, tip, {"cx": x, "cy": y, "r": radius})

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", most: float = 0.0) -> None:
        """A text from its base line; cut where it would be wider than ``most``, if that is given."""
        if most and text_width(text) > most:
            text = text[: max(1, int(most / _LETTER) - 1)] + "…"
        at = "" if anchor == "start" else anchor
        self._marks.append(element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=at, class_=kind))

    def _mark(self, name: str, kind: str, tip: str, place: Mapping[str, float], **more: str) -> None:
        at = {key: f"{value:.1f}" for key, value in place.items()}
        self._marks.append(element(name, *([element("title", tip)] if tip else []), **at, **more, class_=kind))

    def svg(self) -> Markup:
        """Returns the element."""
        box = f"0 0 {WIDTH:.0f} {self.height:.0f}"
        lines = (joined("\n", mark) for mark in self._marks)
        return element("svg", *lines, "\n", viewBox=box, role="img", aria_label=self.label)
