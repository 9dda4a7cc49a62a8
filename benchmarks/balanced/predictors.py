"""Every predictor in a closed loop with generated series of speeds: pure, without a clock."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.balanced.series import SCENARIOS, closed_loop, series
from benchmarks.kit.figures import Figure, markdown, named
from lightning_hetero.shares.policy import BalancePolicy

DEFAULT = str(inspect.signature(BalancePolicy).parameters["predictor"].default)
PREDICTORS = ("last", "ewma", "kalman", "narx")
LAGS, STEPS, SEEDS = (0, 4), 400, 10
WITHIN, NEVER = 1.03, 1.02  # of the best predictor's time, of equal shares' time
NOTES = (
    f"**Predictors.** Simulated: four ranks, {STEPS} steps, {SEEDS} seeds. *lag*: batches that the loader reads ahead."
    " The total time of all steps over that of the ideal shares, which know each step's speeds beforehand: medians over"
    " the seeds. Free processor time is told where the cause of a change is one that it shows: contention."
)
Played = Mapping[str, Mapping[str, list[float]]]


def play(scenario: str, lag: int, quick: bool) -> dict[str, dict[str, list[float]]]:
    """Returns by predictor ``to_equal`` and ``to_ideal``, one per seed: the time over that of other shares."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in PREDICTORS:
        made = [series(scenario, steps=STEPS // 4 if quick else STEPS, seed=s) for s in range(2 if quick else SEEDS)]
        ends = [closed_loop(BalancePolicy(predictor=name), one, lag=lag) for one in made]
        found[name] = {"to_equal": [e.to_equal for e in ends], "to_ideal": [e.to_ideal for e in ends]}
    return found


def measure(quick: bool) -> dict[str, Any]:
    """Returns `play` by scenario and lag."""
    names = ("contention",) if quick else SCENARIOS
    return {f"{name}, lag {lag}": play(name, lag, quick) for name in names for lag in LAGS}


def figures(raw: Mapping[str, Played]) -> list[Figure]:
    """Holds the default against the best predictor and against equal shares."""
    found: list[Figure] = []
    for case, rows in raw.items():
        put = named(f"predictors, {case}")
        medians = {name: statistics.median(row["to_ideal"]) for name, row in rows.items()}
        worst = max(rows[DEFAULT]["to_equal"])
        found.append(put("default / best predictor", medians[DEFAULT] / min(medians.values()), "x", most=WITHIN))
        found.append(put("default / equal shares, worst seed", worst, "x", most=NEVER))
    return found


def table(raw: Mapping[str, Played]) -> str:
    """Returns all predictors, in Markdown."""
    rows = [[case, *(statistics.median(rows[n]["to_ideal"]) for n in PREDICTORS)] for case, rows in raw.items()]
    return markdown(["time / ideal shares", *PREDICTORS], rows)
