"""From what was predicted and what was measured to figures and a table; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

WARM_UP = 8  # steps until shares and predictors have settled
Run = Mapping[str, Any]  # of one engine on one case: what the worker noted


class Compared(NamedTuple):
    """One run of one engine: what it said beforehand, and what it took.

    Attributes:
        predicted_s: time of a step [s]; of the balanced and the stale engine that of the slowest rank's work.
        measured_s: time of a step, the median [s].
        work: predicted / measured own work of the busiest rank, the median over steps; None: not known.
        used: predicted own work / processor time of steps, all ranks together; None: not known.
    """

    predicted_s: float
    measured_s: float
    work: float | None
    used: float | None

    @property
    def step(self) -> float:
        """Predicted / measured time of a step."""
        return self.predicted_s / self.measured_s


Repeats = Sequence[Mapping[str, Mapping[str, Run]]]  # by repeat, case and engine
COLUMNS = {  # words: by which clock, what
    "step": ("wall", "step"),
    "own work": ("wall", "work"),
    "own work, processor time": ("processor", "work"),
    "own work to all processor time of a step": ("processor", "used"),
}


def compared(engine: str, run: Run) -> Compared | None:
    """Holds one run's predictions against its measurements; None: the engine predicts nothing.

    Balanced and stale predict step by step: the median of what they said; the pipeline once, when it plans.
    """
    reports = [r for r in run["reports"] if r["step"] >= WARM_UP and None not in r["predicted_s"]]
    if engine == "ddp" or not reports:
        return None
    measured_s = statistics.median(run["steps_s"][WARM_UP:])
    slowest_s = statistics.median(max(r["predicted_s"]) for r in reports)
    used_s = sum(statistics.median(rank[WARM_UP:]) for rank in run["used_s"])
    # The stale engine predicts the shares it wants, and measures what it granted.
    work = [max(r["predicted_s"]) / max(r["compute_s"]) for r in reports] if engine != "stale" else []
    used = [sum(r["predicted_s"]) / used_s for r in reports] if engine != "stale" else []
    return Compared(
        predicted_s=run["plan"]["total_s"] if "plan" in run else slowest_s,
        measured_s=measured_s,
        work=statistics.median(work) if work else None,
        used=statistics.median(used) if used else None,
    )


def _rows(raw: Mapping[str, Repeats]) -> dict[tuple[str, str], dict[str, list[Compared]]]:
    """Returns all repeats by case and engine, and then by clock."""
    rows: dict[tuple[str, str], dict[str, list[Compared]]] = {}
    for clock, repeats in raw.items():
        for case, engine, run in ((c, e, run) for one in repeats for c, runs in one.items() for e, run in runs.items()):
            found = compared(engine, run)
            if found is not None:
                rows.setdefault((case, engine), {}).setdefault(clock, []).append(found)
    return rows


def _values(row: Mapping[str, list[Compared]], words: str) -> list[float]:
    """Returns one column's ratio in each repeat; empty: it is not known."""
    clock, kind = COLUMNS[words]
    values = [getattr(one, kind) for one in row.get(clock, [])]
    return [] if None in values else values


def figures(raw: Mapping[str, Repeats]) -> list[dict[str, Any]]:
    """Returns the ratios of each case and engine, medians over the repeats, and each engine's range over the cases.

    Args:
        raw: by clock.
    """
    rows = _rows(raw)
    found: list[dict[str, Any]] = []

    def figure(name: str, value: float) -> None:
        found.append({"name": name, "value": value, "unit": "x", "goal": None, "holds": None})

    for (case, engine), row in rows.items():
        for words in COLUMNS:
            if values := _values(row, words):
                figure(f"{case}, {engine}: {words}, predicted / measured", statistics.median(values))
    for engine in dict.fromkeys(engine for _, engine in rows):
        for words in COLUMNS:
            each = [_values(row, words) for (_, other), row in rows.items() if other == engine]
            medians = [statistics.median(values) for values in each if values]
            for name, pick in (("least", min), ("median", statistics.median), ("greatest", max)):
                if medians:
                    figure(f"all models, {engine}: {words}, predicted / measured, {name}", pick(medians))
    return found


def table(raw: Mapping[str, Repeats]) -> str:
    """Returns all cases and engines for readers."""

    def span(values: Sequence[float], form: str) -> str:
        if not values:
            return "–"
        return f"{form} ({form} to {form})".format(statistics.median(values), min(values), max(values))

    head = ["model", "engine", "predicted step [ms]", "measured step [ms]", *COLUMNS, "plan"]
    lines = [head, ["---"] * len(head)]
    for (case, engine), row in _rows(raw).items():
        wall = row.get("wall", [])
        plan = raw["wall"][-1][case][engine].get("plan") if wall else None
        lines.append([
            case,
            engine,
            span([1e3 * one.predicted_s for one in wall], "{:.1f}"),
            span([1e3 * one.measured_s for one in wall], "{:.1f}"),
            *(span(_values(row, words), "{:.2f}") for words in COLUMNS),
            "–" if plan is None else "; ".join(_group(group) for group in plan["groups"]),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _group(group: Mapping[str, Any]) -> str:
    """Writes a pipeline as rank:layers and its micro-batches."""
    cuts = group["cuts"]
    stages = " ".join(f"{rank}:{b - a}" for rank, a, b in zip(group["ranks"], cuts, cuts[1:], strict=False))
    return f"{stages} ({'+'.join(map(str, group['micro_batches']))})"
