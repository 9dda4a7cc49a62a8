"""Marks on a drawing, and their colours for light and dark paper (layer P).

Colours are classes, which the page's style defines by custom properties.

Markup by type: a plain string, e.g. out of a trace, cannot become any.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

_EMPTY = ("rect", "line", "polyline", "circle")  # elements that may have nothing inside and no end


class Markup(str):
    """HTML as it is meant; a plain string that is put together with it is escaped."""

    __slots__ = ()

    def __add__(self, other: str) -> Markup:
        return joined(self, other)

    def __radd__(self, other: str) -> Markup:
        return joined(other, self)


def joined(*parts: str) -> Markup:
    """Returns one behind the other.

    >>> joined("1 < 2", Markup("<br>"))
    '1 &lt; 2<br>'
    """
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def element(name: str, *inside: str, **attributes: str) -> Markup:
    """Returns an element; ``class_`` is ``class``, ``fill_opacity`` has a dash, and empty attributes are left out.

    >>> element("p", "a & b", class_="answer")
    '<p class="answer">a &amp; b</p>'
    """
    named = {key.rstrip("_").replace("_", "-"): escape(text) for key, text in attributes.items() if text}
    head = name + "".join(f' {key}="{text}"' for key, text in named.items())
    return Markup(f"<{head}/>" if name in _EMPTY and not inside else f"<{head}>{joined(*inside)}</{name}>")


WIDTH = 420.0
"""The width of every drawing, in units: wide enough for many ranks, and legible on a phone's 360 pixels."""

RANK_COLOURS = 8
"""The number of colours; ranks beyond begin again."""

_LETTER = 7.2  # a letter's mean width at the usual size

COLOURS = (Path(__file__).parent / "colours.css").read_text()
"""Custom properties, a line for light and one for dark paper."""

MARKS = (Path(__file__).parent / "marks.css").read_text()
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
