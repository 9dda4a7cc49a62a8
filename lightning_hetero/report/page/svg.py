"""Marks on a drawing (layer P). Colours are classes, which the page's style defines for light and dark."""

from __future__ import annotations

from html import escape

__all__ = ["WIDTH", "Drawing", "text_width"]

WIDTH = 420.0
"""Of every drawing, in units: wide enough for a table of ranks, and its letters can be read on a phone's 360 pixels."""

_LETTER = 7.2  # a letter's mean width at the usual size


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
        self._marks: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, *, tip: str = "", opacity: float | None = None
    ) -> None:
        """A filled rectangle; ``tip`` shows when one points at it."""
        if width <= 0.0 or height <= 0.0:
            return
        faint = "" if opacity is None else f' fill-opacity="{opacity:.2f}"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
        self._mark("rect", f'{place}{faint} class="{kind}"', tip)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, *, tip: str = "") -> None:
        """A straight line."""
        self._mark("line", f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"', tip)

    def path(self, points: list[tuple[float, float]], kind: str, *, tip: str = "") -> None:
        """A line through points."""
        if points:
            through = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._mark("polyline", f'points="{through}" class="{kind}"', tip)

    def circle(self, x: float, y: float, radius: float, kind: str, *, tip: str = "") -> None:
        """A filled circle."""
        self._mark("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{kind}"', tip)

    def text(self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", most: float = 0.0) -> None:
        """A text from its base line; cut where it would be wider than ``most``, if that is given."""
        if most and text_width(text) > most:
            text = text[: max(1, int(most / _LETTER) - 1)] + "…"
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        named = f' class="{kind}"' if kind else ""
        self._marks.append(f'<text x="{x:.1f}" y="{y:.1f}"{at}{named}>{escape(text)}</text>')

    def _mark(self, name: str, attributes: str, tip: str) -> None:
        inside = f"<title>{escape(tip)}</title>" if tip else ""
        self._marks.append(f"<{name} {attributes}>{inside}</{name}>" if inside else f"<{name} {attributes}/>")

    def svg(self) -> str:
        """Returns the element."""
        head = f'<svg viewBox="0 0 {WIDTH:.0f} {self.height:.0f}" role="img" aria-label="{escape(self.label)}">'
        return "\n".join([head, *self._marks, "</svg>"])
