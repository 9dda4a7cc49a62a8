"""Colours and marks of the drawings, for light and dark paper (layer P)."""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "MARKS", "RANK_COLOURS", "variables"]

RANK_COLOURS = 8
"""How many; ranks beyond begin again."""

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
.line{{fill:none;stroke-width:1.8;stroke-linejoin:round}}.dashed{{stroke-dasharray:5 4}}
.cell{{fill:var(--cell);background:var(--cell)}}
.work{{fill:var(--work);background:var(--work)}}.exchange{{fill:var(--exchange);background:var(--exchange)}}
.idle{{fill:var(--idle);background:var(--idle)}}.hot{{fill:var(--hot)}}.cool{{fill:var(--cool)}}
{_RANKS}
"""
"""Of the classes that `lightning_hetero.report.page.svg.Drawing` is given; colours are custom properties."""
