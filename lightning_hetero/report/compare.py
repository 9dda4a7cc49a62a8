"""Run A beside run B: did it help? (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_hetero.report.run import Run, named
from lightning_hetero.report.waiting import waiting_of

__all__ = ["Figure", "compared", "per_sample_s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure of two runs; NaN: not known.

    Attributes:
        name: with its unit.
        a, b: of the runs.
        less_is_better: None: neither.
    """

    name: str
    a: float
    b: float
    less_is_better: bool | None


def per_sample_s(run: Run) -> float:
    """Returns what a sample took in training, validation and what is between epochs left out [s]; NaN where own work
    was not measured."""
    samples = math.fsum(step.samples for step in run.steps)
    if not samples:
        return math.nan
    taken = run.taken_s()
    return math.fsum(taken) / len(taken) / (samples / len(run.steps))


def compared(
    a: Run, b: Run, results: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
) -> list[Figure]:
    """Returns the figures that both runs, or one of them, have.

    Args:
        a, b: the runs.
        results: what their ``result.json`` say; empty: nothing.
    """
    found: list[Figure] = []

    def add(name: str, of_a: float, of_b: float, less_is_better: bool | None) -> None:
        if not (math.isnan(of_a) and math.isnan(of_b)):
            found.append(Figure(name=name, a=of_a, b=of_b, less_is_better=less_is_better))

    waits = [waiting_of(run) if run.steps else None for run in (a, b)]
    add("time per 1,000 samples, within epochs [s]", 1e3 * per_sample_s(a), 1e3 * per_sample_s(b), True)
    of_each = [
        [math.nan] * 3 if w is None else [100 * w.waited, 100 * w.exchange, w.total.total_s] for w in waits
    ]
    for i, (name, better) in enumerate(
        [("waiting [%]", True), ("exchange of gradients [%]", True), ("device-seconds in steps", None)]
    ):
        add(name, of_each[0][i], of_each[1][i], better)
    first, second = results
    add("fit, start-up left out [s]", _number(first, "fit_s"), _number(second, "fit_s"), True)
    add("samples per second of the fit", _number(first, "samples_per_s"), _number(second, "samples_per_s"), False)
    metrics = [named(result.get("metric")) for result in results]
    names = {str(metric.get("name")) for metric in metrics if metric}
    if len(names) == 1:
        less = metrics[0].get("mode", metrics[1].get("mode")) == "min"
        add(names.pop(), _number(metrics[0], "value"), _number(metrics[1], "value"), less)
    return found


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return math.nan if value is None else float(value)
