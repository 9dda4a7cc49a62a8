"""A picture: title, legend, panels, and where its numbers are from, as an SVG that needs nothing else.

The panels are those of the report's page (`lightning_hetero.report.page`), the colours, too. Letters are a little
larger, since a page may show a picture on a phone's 360 pixels.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from lightning_hetero.report.page.charts import COLOURS, MARKS, WIDTH, text_width

Paper = Literal["light", "dark", "both"]
BOTH: Paper = "both"
"""By the reader's preference; for a page whose host knows better than the browser, one file of each."""

PAD = 12.0
_SHOWN = 560  # pixels wide where there is room
_SIZES = (
    "text{font-size:13px}svg text.mute{font-size:12px}svg text.inside{font-size:12px}"
    "text.title{font-size:15px;font-weight:600}text.head{font-weight:600}.paper{fill:var(--paper)}"
    "text{paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}text.inside{stroke:none}"
    ".tick{stroke:var(--ink);stroke-width:2}"
)
_TITLE, _LINE = 48, 62  # letters in a line of the title, of small text
_COLOUR = re.compile(r"var\(--(\w+)\)")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What a picture shows.

    Attributes:
        title: what it says, in one sentence.
        panels: a heading, which may be empty, and the drawing.
        source: what the numbers are and where they are from.
        legend: classes of colours, and their names; of lines ``tick``, an upright one, and ``bound``.
    """

    title: str
    panels: Sequence[tuple[str, str]]
    source: str
    legend: Sequence[tuple[str, str]] = ()


def svg(picture: Picture, paper: Paper = BOTH) -> str:
    """Returns the file."""
    marks: list[str] = []
    y = PAD

    def line(text: str, kind: str, step: float) -> None:
        nonlocal y
        y += step
        marks.append(f'<text x="{PAD:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>')

    for text in textwrap.wrap(picture.title, _TITLE):
        line(text, "title", 19.0 if marks else 12.0)
    y += 8.0
    if picture.legend:
        marks += _legend(picture.legend, y)
        y += 18.0 * (1 + max(row for _, row, _, _ in _places(picture.legend)))
    for heading, drawing in picture.panels:
        if heading:
            line(heading, "head", 20.0)
        y += 6.0
        height = _height(drawing)
        place = f'x="{PAD:.1f}" y="{y:.1f}" width="{WIDTH:.0f}" height="{height:.0f}" overflow="visible" '
        marks.append(drawing.replace("<svg ", f"<svg {place}", 1))
        y += height
    source = picture.source.replace(" %", "\N{NO-BREAK SPACE}%")
    for i, text in enumerate(textwrap.wrap(source, _LINE)):
        line(text, "mute", 15.0 if i else 18.0)
    wide, high = WIDTH + 2.0 * PAD, y + PAD
    size = f'width="{_SHOWN}" height="{_SHOWN * high / wide:.0f}" viewBox="0 0 {wide:.0f} {high:.0f}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="system-ui, sans-serif">',
        f"<title>{escape(picture.title)}</title>",
        f"<style>{_style(paper)}</style>",
        f'<rect width="{wide:.0f}" height="{high:.0f}" class="paper"/>',
        *marks,
        "</svg>",
        "",
    ])  # fmt: skip


def _style(paper: Paper) -> str:
    """Returns the rules with colours in them: not every program that shows an SVG knows custom properties."""
    papers = (dict(re.findall(r"--(\w+):(#\w+)", line)) for line in COLOURS.splitlines())
    light, dark = (_COLOUR.sub(lambda name, c=colours: c[name[1]], MARKS + _SIZES) for colours in papers)
    if paper == "both":
        return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"
    return light if paper == "light" else dark


def _places(entries: Sequence[tuple[str, str]]) -> list[tuple[float, int, str, str]]:
    """Returns where the entries of a legend stand: x, row, class, name."""
    found: list[tuple[float, int, str, str]] = []
    x, row = 0.0, 0
    for kind, name in entries:
        wide = 16.0 + text_width(name)
        if x > 0.0 and x + wide > WIDTH:
            x, row = 0.0, row + 1
        found.append((x, row, kind, name))
        x += wide + 12.0
    return found


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    marks: list[str] = []
    for x, row, kind, name in _places(entries):
        left, base = PAD + x, y + 18.0 * row + 12.0
        if kind == "tick":
            ends = f'x1="{left + 5:.1f}" y1="{base - 10:.1f}" x2="{left + 5:.1f}" y2="{base + 1:.1f}"'
            marks.append(f'<line {ends} class="tick"/>')
        elif kind == "bound":
            ends = f'x1="{left:.1f}" y1="{base - 4.5:.1f}" x2="{left + 12:.1f}" y2="{base - 4.5:.1f}"'
            marks.append(f'<line {ends} class="bound"/>')
        else:
            marks.append(f'<rect x="{left:.1f}" y="{base - 10:.1f}" width="10" height="10" class="{kind}"/>')
        marks.append(f'<text x="{left + 15:.1f}" y="{base:.1f}">{escape(name)}</text>')
    return marks


def _height(drawing: str) -> float:
    found = re.search(r'viewBox="0 0 \S+ (\S+)"', drawing)
    assert found, drawing[:80]
    return float(found[1])
