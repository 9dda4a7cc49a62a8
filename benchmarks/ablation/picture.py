"""``python -m benchmarks.ablation.picture``: draws the simulated part of the results into docs/pictures.

A dot per candidate: its time over that of equal shares, median over the seeds. A panel per lag.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation.candidates import NO_GUARD, PREDICTORS
from benchmarks.ablation.simulated import LAGS
from benchmarks.paper import DARK

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "pictures" / "ablation.svg"
WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 860, 250, 56, 12, 62, 34
COLOURS = {
    "kalman": "#d95f02",
    "narx": "#1f6fb4",
    "curve": "#3a8f3a",
    "ewma": "#7b5ea7",
    "last": "#8c8c8c",
    "tuning": "#c2185b",
}
LOW, HIGH, MARK = 0.2, 1.2, 0.2


def drawn(raw: Mapping[str, Any]) -> str:
    """Returns the picture of the results of the simulated part."""
    ratios = raw["ratios"]
    cases = [case.removesuffix(f", lag {LAGS[0]}") for case in ratios if case.endswith(f", lag {LAGS[0]}")]
    names = list(next(iter(ratios.values())))
    height = TOP + len(LAGS) * PANEL
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="11">',
        DARK,
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Time of a run over that of equal shares, simulated</text>',
        *_legend(names),
    ]
    for panel, lag in enumerate(LAGS):
        rows = [ratios[f"{case}, lag {lag}"] for case in cases]
        title = "the loader reads nothing ahead" if lag == 0 else f"the loader reads {lag} batches ahead"
        out += _panel(TOP + panel * PANEL, title, cases, rows, names)
    return "\n".join([*out, "</svg>"]) + "\n"


def _legend(names: Sequence[str]) -> list[str]:
    shown = [name for name in (*PREDICTORS, "tuning") if name in names]
    out: list[str] = []
    x = LEFT
    for name in shown:
        out += [_dot(x, 36, name, hollow=False), f'<text x="{x + 8}" y="40">{name}</text>']
        x += 70
    if any(name.endswith(NO_GUARD) for name in names):
        out += [_dot(x, 36, shown[0], hollow=True), f'<text x="{x + 8}" y="40">hollow: no guard</text>']
        x += 130
    out.append(f'<line x1="{x - 6}" y1="36" x2="{x + 10}" y2="36" stroke="black"/>')
    return [*out, f'<text x="{x + 14}" y="40">ideal</text>']


def _panel(
    top: float,
    title: str,
    cases: Sequence[str],
    rows: Sequence[Mapping[str, Mapping[str, Sequence[float]]]],
    names: Sequence[str],
) -> list[str]:
    bottom = top + PANEL - BOTTOM

    def y(value: float) -> float:
        part = (min(max(value, LOW), HIGH) - LOW) / (HIGH - LOW)
        return bottom - part * (PANEL - BOTTOM - 22)

    out = [f'<text x="{LEFT}" y="{top + 8:.0f}" fill="#555">{title}</text>']
    for k in range(round((HIGH - LOW) / MARK) + 1):
        value = LOW + k * MARK
        colour = "#888" if abs(value - 1.0) < 1e-9 else "#ddd"
        ends = f'x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}"'
        out.append(f'<line {ends} stroke="{colour}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    wide = (WIDTH - LEFT - RIGHT) / len(cases)
    for i, (case, row) in enumerate(zip(cases, rows, strict=True)):
        middle = LEFT + (i + 0.5) * wide
        one = next(iter(row.values()))
        ideal = statistics.median(e / b for e, b in zip(one["to_equal"], one["to_ideal"], strict=True))
        left, right = middle - 0.42 * wide, middle + 0.42 * wide
        ends = f'x1="{left:.1f}" y1="{y(ideal):.1f}" x2="{right:.1f}" y2="{y(ideal):.1f}"'
        out.append(f'<line {ends} stroke="black"/>')
        for k, name in enumerate(names):
            x = middle + ((k + 0.5) / len(names) - 0.5) * 0.8 * wide
            value = statistics.median(row[name]["to_equal"])
            out.append(_dot(x, y(value), name.removesuffix(NO_GUARD), hollow=name.endswith(NO_GUARD)))
        for line, words in enumerate(case.split(": " if ": " in case else ", ")):
            place = f'x="{middle:.1f}" y="{bottom + 14 + 12 * line:.1f}"'
            out.append(f'<text {place} text-anchor="middle">{words}</text>')
    return out


def _dot(x: float, y: float, name: str, *, hollow: bool) -> str:
    colour = COLOURS[name]
    fill = "white" if hollow else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'


if __name__ == "__main__":
    _report = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    PICTURE.write_text(drawn(_report["raw"]["simulated"]), encoding="utf-8")
