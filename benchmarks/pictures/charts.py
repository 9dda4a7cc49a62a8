"""Charts that the report's page does not have: groups of thin bars below their names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetero.report.page.drawing import WIDTH, Drawing, text_width

_NAME, _PITCH, _BAR, _GAP = 15.0, 15.0, 10.0, 7.0


class Bar(NamedTuple):
    """A bar and what stands behind it; ``missed``: a goal, which the text says in red."""

    kind: str
    value: float
    text: str
    missed: bool = False


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
    bars = [bar for group in every for bar in group.bars]
    ticks = [group.tick for group in every if not math.isnan(group.tick)]
    most = max([bar.value for bar in bars] + ticks + [value for value, _ in marks])
    # The longest text need not stand behind the longest bar.
    scale = min((WIDTH - 8.0 - text_width(bar.text)) / bar.value for bar in bars if bar.value > 0.0)
    scale = min(scale, (WIDTH - 6.0) / most)
    head = 18.0 if marks else 0.0
    height = head + sum(_NAME + _PITCH * len(group.bars) + _GAP for group in every)
    drawing = Drawing(height, label)
    _marks(drawing, [(value * scale, name) for value, name in marks], height)
    y = head
    for group in every:
        drawing.text(0.0, y + 11.0, group.name, most=WIDTH)
        y += _NAME
        top = y
        for bar in group.bars:
            drawing.rect(0.0, y + 1.0, bar.value * scale, _BAR, bar.kind)
            drawing.text(bar.value * scale + 5.0, y + 10.5, bar.text, "hot" if bar.missed else "")
            y += _PITCH
        if not math.isnan(group.tick):
            drawing.line(group.tick * scale, top - 1.0, group.tick * scale, y - 2.0, "tick")
        y += _GAP
    return drawing.svg()


def _marks(drawing: Drawing, marks: Sequence[tuple[float, str]], height: float) -> None:
    """Draws vertical lines and their names above, on the side where there is room."""
    end = WIDTH
    for x, name in sorted(marks, reverse=True):
        drawing.line(x, 14.0, x, height - 2.0, "mark")
        right = x + 4.0 + text_width(name) <= end
        drawing.text(x if right else x + 2.0, 11.0, name, "mute", anchor="start" if right else "end")
        end = x - 6.0 if right else x - text_width(name) - 6.0
