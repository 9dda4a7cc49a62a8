"""The table of the results and of docs/theory/stale.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.results import Results

__all__ = ["of_docs", "table_of"]


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a line per recipe and case: both rules, the default in bold, and the new over the old."""
    head = ["recipe", "devices", "late samples", "join: loss to DDP", "complete: loss to DDP", "complete to join"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = {name: f"{row[name]:.2f} +- {row[name + '_error']:.2f}" for name in ("join", "complete", "ratio")}
        cells[row["default"]] = f"**{cells[row['default']]}**"
        lines.append([row["recipe"], row["case"], f"{100.0 * row['late']:.0f} %", *cells.values()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_docs(results: Results) -> str:
    """Returns a line per recipe: both rules over all cases and in the worst, the default in bold."""
    head = ["recipe", "join: all cases", "join: worst", "complete: all cases", "complete: worst"]
    lines = [head, ["---"] * len(head)]
    rows = results.raw["rows"]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        some = [row for row in rows if row["recipe"] == recipe]
        cells: list[str] = []
        for rule in ("join", "complete"):
            losses = [row[rule] for row in some]
            mark = "**" if some[0]["default"] == rule else ""
            cells += [f"{mark}{x:.2f}{mark}" for x in (statistics.geometric_mean(losses), max(losses))]
        lines.append([recipe, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
