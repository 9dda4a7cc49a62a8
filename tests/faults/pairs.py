"""Combinations of the table's faults with what else a training may have: every pair of values stands in some cell.

Nothing here runs. What holds with each thing alone may not hold with two of them; faults that need three are rare
(Kuhn, Wallace and Gallo, "Software Fault Interactions and Implications for Software Testing", 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from tests.faults.cells import Cell
from tests.faults.table import FAULTS, LAUNCHERS

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "balanced": ("balanced", {}),
    "balanced, rebalance=False": ("balanced", {"rebalance": False}),
    "balanced, min_ranks=2": ("balanced", {"min_ranks": 2}),
    "stale": ("stale", {}),
    "stale, transport='pairs'": ("stale", {"transport": "pairs"}),
    "pipeline": ("pipeline", {}),
    "pipeline, depth='low_memory'": ("pipeline", {"depth": "low_memory"}),
    "federated": ("federated", {}),
    "federated, min_clients=2": ("federated", {"min_clients": 2, "liveness_s": 3.0}),
}
FACTORS: dict[str, Sequence[Any]] = {
    "fault": (
        "none", "SIGKILL of a worker", "SIGKILL of rank 0", "SIGTERM to a worker", "stopped for 1.5 s",
        "exception in a step", "SIGKILL of every process at once",
    ),
    "variant": tuple(VARIANTS),
    "launcher": LAUNCHERS,
    "ranks": (2, 3, 4),
    "precision": ("", "32-true", "bf16-mixed"),
    "validation": (True, False),
    "save_every": (0, 5),
    "resumed": (False, True),
    "accumulate": (1, 2),
}  # fmt: skip


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """Returns the pairs of values of a row."""
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def pairwise(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Returns rows in which every pair of values occurs that an allowed row can have; greedy, always the same.

    A row begins with a pair that is not covered yet; each further factor gets the value that covers most of the rest,
    of equals the one that was taken least often.

    Args:
        factors: names and values; those with most values first give the fewest rows.
        allowed: of a row, whole or not: whether there is such a combination.
    """
    names = list(factors)
    missing = {
        (a, x, b, y): None for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]
        if allowed({a: x, b: y})
    }  # fmt: skip
    taken = {(name, value): 0 for name in names for value in factors[name]}
    rows = []
    while missing:
        a, x, b, y = next(iter(missing))
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                tried = [value for value in factors[name] if allowed({**row, name: value})]
                row[name] = max(tried, key=lambda v: (_new(row, name, v, names, missing), -taken[name, v]))
        row = {name: row[name] for name in names}
        for pair in pairs_of(row):
            missing.pop(pair, None)
        for name, value in row.items():
            taken[name, value] += 1
        rows.append(row)
    return rows


def _new(row: Row, name: str, value: Any, names: list[str], missing: Mapping[Pair, None]) -> int:
    """Returns how many pairs a row would cover that no other row does."""
    at = names.index
    pairs = [sorted([(at(other), other, row[other]), (at(name), name, value)], key=lambda one: one[0]) for other in row]
    return sum((a, x, b, y) in missing for (_, a, x), (_, b, y) in pairs)


def allowed(row: Mapping[str, Any]) -> bool:
    """Whether there is such a training: a pipeline cuts its batches itself."""
    return not (str(row.get("variant", "")).startswith("pipeline") and row.get("accumulate", 1) > 1)


def cells() -> Iterator[Cell]:
    """Yields a cell per row."""
    for row in pairwise(FACTORS, allowed):
        engine, options = VARIANTS[row["variant"]]
        more = {name: row[name] for name in ("precision", "validation", "save_every", "resumed", "accumulate")}
        fault = FAULTS[row["fault"]]
        if row["launcher"] == "spawn":  # its processes find each other by names in /dev/shm
            fault = replace(fault, needs="")
        yield Cell(engine, row["launcher"], fault, row["ranks"], {**more, "options": options}, label(row))


def label(row: Mapping[str, Any]) -> str:
    """Returns what a row has besides its fault, engine and launcher, in words."""
    _, _, option = row["variant"].partition(", ")
    said = [option, f"{row['ranks']} ranks", row["precision"] or "64-true"]
    said += ["validation"] if row["validation"] else []
    said += ["checkpoints"] if row["save_every"] else []
    said += ["resumed"] if row["resumed"] else []
    said += [f"accumulate {row['accumulate']}"] if row["accumulate"] > 1 else []
    return ", ".join(filter(None, said))
