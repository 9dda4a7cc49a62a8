"""From what was predicted and what was measured to figures and a table; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["WARM_UP", "Compared", "compared", "figures", "table"]

WARM_UP = 8  # steps until shares and predictors have settled
Run = Mapping[str, Any]  # of one engine on one case: what the worker noted


class Compared(NamedTuple):
    """One run of one engine: what it said beforehand, and what it took.

    Attributes:
        predicted_s: time of a step [s]; of the balanced and the stale engine that of the slowest rank's work.
        measured_s: time of a step, the median [s].
        work: predicted / measured own work of the busiest rank, the median over steps; None: not known.
        used: predicted own work / processor time, all ranks together; None: not known. Others at work on the
            machine do not change the processor time.
    """

    predicted_s: float
    measured_s: float
    work: float | None
    used: float | None

    @property
    def step(self) -> float:
        """Predicted / measured time of a step."""
        return self.predicted_s / self.measured_s


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
    used = [sum(r["predicted_s"]) / used_s for r in reports] if "plan" in run else []
    return Compared(
        predicted_s=run["plan"]["total_s"] if "plan" in run else slowest_s,
        measured_s=measured_s,
        work=statistics.median(work) if work else None,
        used=statistics.median(used) if used else None,
    )


def _rows(raw: Sequence[Mapping[str, Mapping[str, Run]]]) -> dict[tuple[str, str], list[Compared]]:
    """Returns all repeats by case and engine."""
    rows: dict[tuple[str, str], list[Compared]] = {}
    for repeat in raw:
        for case, engines in repeat.items():
            for engine, run in engines.items():
                one = compared(engine, run)
                if one is not None:
                    rows.setdefault((case, engine), []).append(one)
    return rows


def figures(raw: Sequence[Mapping[str, Mapping[str, Run]]]) -> list[dict[str, Any]]:
    """Returns the ratio of each case and engine, the median over the repeats, and each engine's range over the cases.

    Args:
        raw: by repeat, case and engine.
    """
    rows = _rows(raw)
    found: list[dict[str, Any]] = []

    def figure(name: str, value: float) -> None:
        found.append({"name": name, "value": value, "unit": "x", "goal": None, "holds": None})

    kinds = {"step": "step", "work": "own work", "used": "work to processor time"}
    for (case, engine), repeats in rows.items():
        for kind, words in kinds.items():
            values = [getattr(one, kind) for one in repeats]
            if None not in values:
                figure(f"{case}, {engine}: {words}, predicted / measured", statistics.median(values))
    for engine in dict.fromkeys(engine for _, engine in rows):
        for kind, words in kinds.items():
            each = [[getattr(one, kind) for one in many] for (_, e), many in rows.items() if e == engine]
            medians = [statistics.median(values) for values in each if None not in values]
            for name, pick in (("least", min), ("median", statistics.median), ("greatest", max)):
                if medians:
                    figure(f"all models, {engine}: {words}, predicted / measured, {name}", pick(medians))
    return found


def table(raw: Sequence[Mapping[str, Mapping[str, Run]]]) -> str:
    """Returns all cases and engines for readers, with stock DDP's step beside them."""

    def span(values: Sequence[float | None], form: str) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return "–"
        return f"{form} ({form} to {form})".format(statistics.median(known), min(known), max(known))

    head = ["model", "engine", "predicted step [ms]", "measured step [ms]", "step", "own work", "to processor time",
            "plan"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for (case, engine), repeats in _rows(raw).items():
        plan = raw[-1][case][engine].get("plan")
        lines.append([
            case,
            engine,
            span([1e3 * one.predicted_s for one in repeats], "{:.1f}"),
            span([1e3 * one.measured_s for one in repeats], "{:.1f}"),
            span([one.step for one in repeats], "{:.2f}"),
            span([one.work for one in repeats], "{:.2f}"),
            span([one.used for one in repeats], "{:.2f}"),
            "–" if plan is None else "; ".join(_group(group) for group in plan["groups"]),
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _group(group: Mapping[str, Any]) -> str:
    """Writes a pipeline as rank:layers and its micro-batches."""
    cuts = group["cuts"]
    stages = " ".join(f"{rank}:{b - a}" for rank, a, b in zip(group["ranks"], cuts, cuts[1:], strict=False))
    return f"{stages} ({'+'.join(map(str, group['micro_batches']))})"
