"""The table of docs/theory/stale.md, from the results."""

from __future__ import annotations

from benchmarks.results import Results

__all__ = ["table_of"]


def table_of(results: Results) -> str:
    """Returns a row per recipe and case: both rules, and the new over the old."""
    head = ["recipe", "devices", "late samples", "join: loss to DDP", "complete: loss to DDP", "complete to join"]
    lines = [head, ["---"] * len(head)]
    for row in results.raw["rows"]:
        cells = [f"{row[name]:.2f} +- {row[name + '_error']:.2f}" for name in ("join", "complete", "ratio")]
        lines.append([row["recipe"], row["case"], f"{100.0 * row['late']:.0f} %", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
