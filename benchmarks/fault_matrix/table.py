"""The tables of docs/reference/faults.md, from the results."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.results import DASH, Results

Row = dict[str, Any]
_HOOK = "exception in "


def fault_table(results: Results) -> str:
    """Returns a row per fault and a column per engine: what came of it under the launchers; others are named."""
    mine = [row for row in _rows(results) if not _is_hook(row) and "combined" not in row]
    engines, faults = (list(dict.fromkeys(row[key] for row in mine)) for key in ("engine", "fault"))
    of = {(e, f): [r for r in mine if (r["engine"], r["fault"]) == (e, f)] for e in engines for f in faults}
    return _table(["fault", *engines], [[f, *(_outcomes(of[e, f]) for e in engines)] for f in faults])


def _outcomes(rows: Sequence[Row]) -> str:
    """What most launchers saw, with the longest time from fault to end; then others, with their launchers."""
    seen: dict[str, list[Row]] = {}
    for row in rows:
        seen.setdefault(_said(row), []).append(row)
    most = max(seen, key=lambda said: len(seen[said]), default=DASH)
    others = [
        f"{' and '.join(row['launcher'] for row in seen[said])}: {_timed(said, seen[said])}"
        for said in seen
        if said != most
    ]
    return "; ".join([_timed(most, seen.get(most, [])), *others])


def _timed(said: str, rows: Sequence[Row]) -> str:
    return f"{said}, {max(row['seconds'] for row in rows):.0f} s" if said.startswith(("ended", "**fails")) else said


def hook_table(results: Results) -> str:
    """Returns a row per outcome, with its engines: how many places of a user's code were tried, and the worst end."""
    engines: dict[tuple[str, ...], list[str]] = {}
    hooks = [row for row in _rows(results) if _is_hook(row)]
    for engine in dict.fromkeys(row["engine"] for row in hooks):
        mine = [row for row in hooks if row["engine"] == engine]
        holds = [row for row in mine if not row["violations"]]
        worst = max(holds, key=lambda row: row["seconds"])
        place = worst["fault"].removeprefix(_HOOK)
        slowest = f"{worst['seconds']:.0f} s (`{place}`)"
        engines.setdefault((str(len(mine)), str(len(holds)), slowest), []).append(engine)
    lines = [[", ".join(names), *cells] for cells, names in engines.items()]
    return _table(["engine", "places tried", "of these ended as they should", "slowest"], lines)


def failing_list(results: Results) -> str:
    """Returns the cells that do not hold, each with what was seen and why; and what was skipped."""
    rows = _rows(results)
    fails = [row for row in rows if row.get("violations")]
    lines = [
        [row["cell"], f"{row['seconds']:.0f} s", _escaped("; ".join(row["violations"])), row["known"] or "not known"]
        for row in fails
    ]
    said = _table(["cell", "from fault to end", "seen", "why"], lines) if lines else "Every cell that ran holds."
    reasons: dict[str, int] = {}
    for row in rows:
        if row["outcome"] == "skipped":
            reasons[row["why"]] = reasons.get(row["why"], 0) + 1
    skipped = [f"Skipped, {count} cells: {why}." for why, count in reasons.items()]
    aborted = [row["engine"] for row in rows if -signal.SIGABRT in row.get("codes", ())]
    ends = [
        f"Ended by SIGABRT (exit code -6), when a process that had said the cause ended: {aborted.count(engine)} cells"
        f" of the {engine} engine; a thread still waits in torch then."
        for engine in dict.fromkeys(aborted)
    ]
    said_of = [*_combinations(rows), *(skipped or ["No cell was skipped."]), *ends]
    paragraphs = [textwrap.fill(text, 120) for text in said_of]
    return "\n\n".join([said, *paragraphs])


def _combinations(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence on the combinations of faults with what else a training may have, if any were tried."""
    ran = [row for row in rows if "combined" in row and row["outcome"] != "skipped"]
    hold = sum(not row["violations"] for row in ran)
    return [f"Of the combinations {len(ran)} were tried, and {hold} of them hold."] if ran else []


def _rows(results: Results) -> list[Row]:
    return results.raw["cells"]


def _is_hook(row: Row) -> bool:
    return row["fault"].startswith(_HOOK) and row["fault"] != "exception in a step" and "combined" not in row


def _said(row: Row) -> str:
    if row["outcome"] == "skipped":
        return "skipped"
    if row["violations"]:
        return f"**fails**: {row['outcome']}"
    if row["outcome"] == "survived":
        left = row["finished"]
        return "survived" if len(left) in (0, 3) else f"survived by {' and '.join(map(str, left))}"
    return "refused" if row["outcome"] == "refused" else "ended"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
