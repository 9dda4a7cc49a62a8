"""Charts of the report (layer P).

Marks on a drawing, and their colours for light and dark paper.

Colours are classes, which the page's style defines by custom properties.

Markup by type: a plain string, e.g. out of a trace, cannot become any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


_ROW, _BAR = 20.0, 14.0
_RIGHT = 18.0  # for half of an axis's last number
_MOST_POINTS, _MOST_DOTS = 240, 60  # of a line
_ON_COLOUR = 0.75  # strength from which letters need the colour for those on colours


def rank_kind(rank: int) -> str:
    """Returns the class of a rank's colour."""
    return f"r{rank % RANK_COLOURS}"


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Returns a line of colours and their names."""
    items = [element("span", element("i", class_=kind), name, class_="key") for kind, name in entries]
    return element("p", *items, class_="legend")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A part of a time line [s]."""

    start_s: float
    end_s: float
    kind: str
    tip: str = ""
    label: str = ""


def time_lines(
    rows: Sequence[tuple[str, Sequence[Span]]], *, end_s: float, label: str, breaks: Sequence[int] = ()
) -> Markup:
    """Returns rows of spans on one axis from 0 to ``end_s``.

    Args:
        rows: a name and its spans.
        end_s: of the axis.
        label: what it says.
        breaks: rows before which there is a gap.
    """
    left = min(150.0, 10.0 + max(text_width(name) for name, _ in rows))
    gaps = [sum(1 for b in breaks if b <= i) * 10.0 for i in range(len(rows))]
    drawing = Drawing(_ROW * len(rows) + (gaps[-1] if gaps else 0.0) + 26.0, label)
    scale = (WIDTH - left - _RIGHT) / end_s if end_s > 0 else 0.0
    bottom = drawing.height - 22.0
    for tick in _ticks(0.0, end_s * 1e3, most=5):
        x = left + tick * 1e-3 * scale
        drawing.line(x, 2.0, x, bottom, "grid")
        drawing.text(x, bottom + 14.0, f"{tick:g}" + (" ms" if tick == 0 else ""), "mute", anchor="middle")
    for i, (name, spans) in enumerate(rows):
        y = _ROW * i + gaps[i] + 3.0
        drawing.text(0.0, y + 11.0, name, most=left - 6.0)
        for span in spans:
            start_s, stop_s = max(0.0, span.start_s), min(end_s, span.end_s)
            width = (stop_s - start_s) * scale
            drawing.rect(left + start_s * scale, y, width, _BAR, span.kind, tip=span.tip)
            if span.label and width > text_width(span.label):
                drawing.text(left + start_s * scale + width / 2.0, y + 11.0, span.label, "inside", anchor="middle")
    return drawing.svg()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A row of parts, one behind the other; ``text`` stands at its end."""

    name: str
    parts: Sequence[tuple[str, float]]
    text: str = ""
    tip: str = ""


def bars(rows: Sequence[Bar], *, label: str) -> Markup:
    """Returns horizontal bars."""
    most = max((math.fsum(value for _, value in row.parts) for row in rows), default=0.0) or 1.0
    left = min(200.0, 10.0 + max(text_width(row.name) for row in rows))
    right = 8.0 + max(text_width(row.text) for row in rows)
    drawing = Drawing(_ROW * len(rows) + 6.0, label)
    scale = (WIDTH - left - right) / most
    for i, row in enumerate(rows):
        y, x = _ROW * i + 4.0, left
        drawing.text(0.0, y + 11.0, row.name, most=left - 6.0)
        for kind, value in row.parts:
            drawing.rect(x, y, value * scale, _BAR, kind, tip=row.tip)
            x += max(0.0, value) * scale
        drawing.text(x + 5.0, y + 11.0, row.text)
    return drawing.svg()


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a chart; points whose value is NaN are left out."""

    name: str
    kind: str
    y: Sequence[float]
    x: Sequence[float] = field(default_factory=list[float])
    dots: bool = False


def lines(
    series: Sequence[Line], *, label: str, x_name: str, y_name: str, marks: Sequence[tuple[float, str]] = (),
    level: float = math.nan, fit: bool = False, whole: bool = True,
) -> Markup:  # fmt: skip
    """Returns a line chart, of several lines with a legend.

    Args:
        series: lines; without ``x`` points are numbered from 0.
        label: what it says.
        x_name, y_name: of the axes.
        marks: places on the x axis with a vertical line, and what happened there.
        level: a horizontal line.
        fit: the y axis begins near the least value, not at 0.
        whole: x counts something; else it begins at 0.
    """
    points = [
        _thinned([(a, b) for a, b in zip(line.x or range(len(line.y)), line.y, strict=True) if not math.isnan(b)])
        for line in series
    ]
    values = [b for line in points for _, b in line] + ([] if math.isnan(level) else [level])
    xs = [a for line in points for a, _ in line] or [0.0]
    low, high = min(values if fit and values else [0.0, *values]), max(values, default=1.0)
    if high - low < 1e-12:
        high = low + 1.0
    y_ticks = _ticks(low, high, most=5)
    left = 14.0 + max(text_width(f"{tick:g}") for tick in y_ticks)
    drawing = Drawing(210.0, label)
    top, bottom = 22.0, 178.0
    x_low = min(xs) if whole else 0.0
    x_high = max(max(xs), x_low + 1e-9)

    def at(a: float, b: float) -> tuple[float, float]:
        part_x, part_y = (a - x_low) / (x_high - x_low), (b - low) / (high - low)
        return left + part_x * (WIDTH - left - _RIGHT), bottom - part_y * (bottom - top)

    drawing.text(0.0, 12.0, y_name, "mute")
    for tick in y_ticks:
        y = at(x_low, tick)[1]
        drawing.line(left, y, WIDTH - _RIGHT, y, "grid")
        drawing.text(left - 5.0, y + 4.0, f"{tick:g}", "mute", anchor="end")
    for tick in _ticks(x_low, x_high, most=6, least=float(whole)):
        drawing.text(at(tick, low)[0], bottom + 15.0, f"{tick:g}", "mute", anchor="middle")
    drawing.text(WIDTH - _RIGHT, bottom + 29.0, x_name, "mute", anchor="end")
    for place, tip in marks:
        x = at(min(max(place, x_low), x_high), low)[0]
        drawing.line(x, top, x, bottom, "mark", tip=tip)
    if not math.isnan(level):
        drawing.line(left, at(x_low, level)[1], WIDTH - _RIGHT, at(x_low, level)[1], "bound")
    for line, known in zip(series, points, strict=True):
        drawing.path([at(a, b) for a, b in known], f"line {line.kind}", tip=line.name)
        if (line.dots and len(known) <= _MOST_DOTS) or len(known) == 1:
            for a, b in known:
                drawing.circle(*at(a, b), 3.0, line.kind, tip=f"{line.name}: {b:.4g}")
    keys = legend([(line.kind, line.name) for line in series]) if len(series) > 1 else Markup()
    return keys + drawing.svg()


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most so many points that a line can show, the last one among them."""
    every = -(-len(points) // _MOST_POINTS) or 1
    return points[(len(points) - 1) % every :: every]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of a heat map: text, colour by class and by strength from 0 to 1, and what it says when pointed at."""

    text: str
    kind: str
    strength: float
    tip: str


def ratio_cell(ratio: float, tip: str) -> Cell | None:
    """Returns a cell that is pale at 1 and full from 1.5 on, or cool below 1; None: not known."""
    if math.isnan(ratio):
        return None
    kind, strength = "hot" if ratio >= 1.0 else "cool", min(1.0, 2.0 * abs(ratio - 1.0))
    return Cell(text=f"{ratio:.2f}", kind=kind, strength=strength, tip=tip)


def heat_map(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell | None]], *, label: str, x_name: str
) -> Markup:
    """Returns a row of cells for each name; None: an empty cell. Texts stand in cells that are wide enough."""
    left = min(150.0, 10.0 + max(text_width(name) for name in rows))
    wide = (WIDTH - left) / max(1, len(columns))
    drawing = Drawing(_ROW * len(rows) + 34.0, label)
    for i, (name, row) in enumerate(zip(rows, cells, strict=True)):
        y = 16.0 + _ROW * i
        drawing.text(0.0, y + 13.0, name, most=left - 6.0)
        for j, cell in enumerate(row):
            if cell is None:
                continue
            x = left + wide * j
            drawing.rect(x + 0.5, y, wide - 1.0, _ROW - 2.0, "cell", tip=cell.tip)
            drawing.rect(x + 0.5, y, wide - 1.0, _ROW - 2.0, cell.kind, opacity=cell.strength, tip=cell.tip)
            if wide > 30.0:
                letters = "inside" if cell.strength >= _ON_COLOUR else ""
                drawing.text(x + wide / 2.0, y + 13.0, cell.text, letters, anchor="middle")
    every = max(1, math.ceil(max(map(text_width, columns), default=1.0) / wide))
    for j in range(0, len(columns), every):
        drawing.text(left + wide * (j + 0.5), 11.0, columns[j], "mute", anchor="middle")
    drawing.text(WIDTH, drawing.height - 3.0, x_name, "mute", anchor="end")
    return drawing.svg()


def _ticks(low: float, high: float, *, most: int, least: float = 0.0) -> list[float]:
    """Returns round numbers between two values, at least ``least`` apart."""
    span = high - low
    if not span > 0.0:
        return [low]
    raw = max(span / most, least)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1.0, 2.0, 5.0, 10.0) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + i) * step, 10) for i in range(max(1, count))]
