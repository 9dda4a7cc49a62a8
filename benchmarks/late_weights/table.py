"""The table of docs/theory/stale.md, from the results."""

from __future__ import annotations

from benchmarks.results import Results

__all__ = ["table_of"]


def table_of(results: Results) -> str:
    """Returns a row per rule: the recipe at the edge case by case, and others under spells."""
    rows = [row for row in results.raw["rows"] if row["stage"] == "other seeds" and row["rule"] != "chance"]
    edge = rows[0]["recipe"]
    places = list(dict.fromkeys((row["recipe"], row["case"]) for row in rows))
    lines = [["rule", *(f"{'edge' if recipe == edge else recipe}: {case}" for recipe, case in places)]]
    lines.append(["---"] * len(lines[0]))
    for rule in dict.fromkeys(row["rule"] for row in rows):
        mine = {(row["recipe"], row["case"]): row for row in rows if row["rule"] == rule}
        cells = [f"{mine[place]['loss_to_ddp']:.2f} +- {mine[place]['standard_error']:.2f}" for place in places]
        lines.append([rule, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
