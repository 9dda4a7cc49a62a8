"""Charts that the report's page does not have: groups of thin bars below their names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetero.report.page.charts import WIDTH, Drawing, text_width

_NAME, _PITCH, _BAR, _GAP = 15.0, 15.0, 10.0, 7.0


class Bar(NamedTuple):
    """A bar and what stands behind it."""

    kind: str
    value: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Group:
    """Bars below a name; ``tick``: a value that is marked on all of them."""

    name: str
    bars: Sequence[Bar]
    tick: float = math.nan


def groups(every: Sequence[Group], *, label: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Returns horizontal bars from 0, in groups, with vertical lines at ``marks``.

    Args:
        every: the groups.
        label: what the drawing says.
        marks: values on the axis and what they are.
    """
    ends = [(_end(group, bar), bar.text) for group in every for bar in group.bars]
    ticks = [group.tick for group in every if not math.isnan(group.tick)]
    most = max([end for end, _ in ends] + ticks + [value for value, _ in marks])
    # The longest text need not stand behind the longest bar.
    scale = min((WIDTH - 8.0 - text_width(text)) / end for end, text in ends if end > 0.0)
    scale = min(scale, (WIDTH - 6.0) / most)
    head = 18.0 if marks else 0.0
    height = head + sum(_NAME + _PITCH * len(group.bars) + _GAP for group in every)
    drawing = Drawing(height, label)
    lines = [(value * scale, name) for value, name in marks]
    _names(drawing, lines)
    y = head
    for group in every:
        drawing.text(0.0, y + 11.0, group.name, most=WIDTH)
        _pass(drawing, lines, y, y + _NAME, (0.0, group.name))
        y += _NAME
        top = y
        for bar in group.bars:
            drawing.rect(0.0, y + 1.0, bar.value * scale, _BAR, bar.kind)
            left = _end(group, bar) * scale + 5.0
            drawing.text(left, y + 10.5, bar.text)
            _pass(drawing, lines, y, y + _PITCH, (left, bar.text))
            y += _PITCH
        if not math.isnan(group.tick):
            drawing.line(group.tick * scale, top - 1.0, group.tick * scale, y - 2.0, "tick")
        _pass(drawing, lines, y, y + _GAP)
        y += _GAP
    return drawing.svg()


def _end(group: Group, bar: Bar) -> float:
    """Returns where a bar ends, or the tick behind it."""
    return max(bar.value, 0.0 if math.isnan(group.tick) else group.tick)


def _names(drawing: Drawing, lines: Sequence[tuple[float, str]]) -> None:
    """Writes the names of vertical lines above them, on the side where there is room."""
    end = WIDTH
    for x, name in sorted(lines, reverse=True):
        right = x + 4.0 + text_width(name) <= end
        drawing.text(x if right else x + 2.0, 11.0, name, "mute", anchor="start" if right else "end")
        end = x - 6.0 if right else x - text_width(name) - 6.0


def _pass(
    drawing: Drawing, lines: Sequence[tuple[float, str]], top: float, end: float, text: tuple[float, str] = (0.0, "")
) -> None:
    """Draws a piece of the vertical lines, but for those that a text with this left end is in the way of."""
    left, right = text[0], text[0] + text_width(text[1])
    for x, _ in lines:
        if not text[1] or not left - 3.0 < x < right + 3.0:
            drawing.line(x, top, x, end, "mark")
