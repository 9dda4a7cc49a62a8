"""Every candidate in a closed loop with every series: pure, without a clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from benchmarks.ablation.candidates import PREDICTORS, available, default_name
from benchmarks.ablation.recordings import FIXED_S, PER_SAMPLE_S, TOTAL, recorded, recordings
from benchmarks.balanced.series import SCENARIOS, Series, closed_loop, series

Ratios: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""Scenario and lag -> candidate -> ``to_equal``, ``to_ideal`` -> one per seed."""

LAGS = (0, 4)
RANKS, STEPS, SEEDS = 4, 400, 10
WITHIN = 1.03  # of the best predictor's time
NEVER = 1.02  # of equal shares' time

NOTES = (
    f"Four ranks, {STEPS} steps, {SEEDS} seeds; batches of {TOTAL} samples, a rank at full speed takes"
    f" {FIXED_S * 1e3:g} ms and {PER_SAMPLE_S * 1e3:g} ms per sample. *lag*: batches that the loader reads ahead. The"
    " total time of all steps, over that of equal shares and over that of the ideal shares, which know each step's"
    " speeds beforehand: median over the seeds (worst seed). Free processor time is told where the cause of a change is"
    " one that it shows: contention. *Recorded* series are times of real processes beside busy loops that come and go,"
    " played from another step on for each seed. *No guard*: `BalancePolicy(guard=False)`."
)


def measure(quick: bool, seeds: int = SEEDS, steps: int = STEPS) -> dict[str, Any]:
    """Runs all loops; quick: two seeds of half as many steps."""
    if quick:
        seeds, steps = 2, steps // 2
    found, missing = available()
    kinds: dict[str, Callable[[int], Series]] = {
        name: partial(_generated, name, steps) for name in SCENARIOS
    } | {f"recorded: {name}": partial(_recorded, name, seeds) for name in recordings()}
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for kind, make in kinds.items():
        played = [make(seed) for seed in range(seeds)]
        for lag in LAGS:
            rows = ratios[f"{kind}, lag {lag}"] = {}
            for candidate in found:
                ends = [
                    closed_loop(
                        candidate.make(), one, total=TOTAL, lag=lag, fixed_s=FIXED_S, per_sample_s=PER_SAMPLE_S
                    )
                    for one in played
                ]
                rows[candidate.name] = {
                    "to_equal": [end.to_equal for end in ends],
                    "to_ideal": [end.to_ideal for end in ends],
                }
    return {"ratios": ratios, "missing": missing}


def _generated(name: str, steps: int, seed: int) -> Series:
    return series(name, ranks=RANKS, steps=steps, seed=seed)


def _recorded(name: str, seeds: int, seed: int) -> Series:
    return recorded(name, seed=seed, seeds=seeds)


def best(raw: Mapping[str, Any], number: int = 3) -> list[str]:
    """Returns the candidates with the least time over the ideal's, mean over all series; the default is among them."""
    ratios: Ratios = raw["ratios"]
    offered = {candidate.name for candidate in available()[0] if candidate.offered}
    names = [name for name in next(iter(ratios.values())) if name in offered]

    def score(name: str) -> float:
        return statistics.fmean(math.log(statistics.median(rows[name]["to_ideal"])) for rows in ratios.values())

    ordered = sorted(names, key=score)
    default = default_name()
    others = [name for name in ordered[:number] if name != default]
    return [default, *others[: number - 1]]


def over_default(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[float, str]:
    """Returns the default's time over the best predictor's, guarded likewise, and which one that is."""
    medians = {name: statistics.median(rows[name]["to_ideal"]) for name in PREDICTORS if name in rows}
    leader = min(medians, key=medians.__getitem__)
    return medians[default_name()] / medians[leader], leader


def figures(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for case, rows in raw["ratios"].items():
        ratio, leader = over_default(rows)
        to_equal = rows[default_name()]["to_equal"]
        worst = max(to_equal)
        out += [
            _figure(f"{case}: default / best predictor", ratio, WITHIN),
            _figure(f"{case}: default / equal shares", statistics.median(to_equal)),
            _figure(f"{case}: default / equal shares, worst seed", worst, NEVER),
            _figure(f"{case}: default / ideal", statistics.median(rows[default_name()]["to_ideal"])),
            _figure(f"{case}: best predictor ({leader}) / ideal", statistics.median(rows[leader]["to_ideal"])),
        ]
    return out


def _figure(name: str, value: float, most: float | None = None) -> dict[str, Any]:
    goal, holds = (None, None) if most is None else (f"<= {most:g}", value <= most)
    return {"name": name, "value": value, "unit": "x", "goal": goal, "holds": holds}


def table(raw: Mapping[str, Any]) -> str:
    """Returns all candidates, as two Markdown tables, and what this version has not."""
    ratios: Ratios = raw["ratios"]
    names = list(next(iter(ratios.values())))
    parts: list[str] = []
    for key, words in (("to_equal", "time / equal shares"), ("to_ideal", "time / ideal shares")):
        lines = [[words, *names], ["---"] * (len(names) + 1)]
        for case, rows in ratios.items():
            cells = [f"{statistics.median(rows[n][key]):.3f} ({max(rows[n][key]):.3f})" for n in names]
            lines.append([case, *cells])
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if raw["missing"]:
        parts.append(f"Not in this version: {'; '.join(raw['missing'])}.")
    return "\n\n".join(parts)
