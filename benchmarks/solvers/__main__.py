"""Times the solvers: `minimax` sits on the critical path of every training step.

Each repeat solves a new problem (new costs, so nothing is remembered between calls), after a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import write_results
from lightning_hetero.solvers import apportion, minimax
from lightning_hetero.types import AffineCost, Allocation, Cost, PiecewiseLinearCost

RANKS = (2, 4, 8, 64, 1000)
SAMPLES_PER_RANK = 64
GOALS_US = {"minimax, affine, n=4": 40.0, "minimax, affine, n=1000": 1000.0}
NOTES = (
    "Median over new random problems, one call each. Ranks differ up to 8-fold in speed, with a fixed cost of up "
    "to 10 ms;\n64 samples per rank. *bounded*: shares between 1/2 and 3/2 of the equal share, which many "
    "ranks meet.\nGoals are for this table's machine and are no test."
)

Problem = tuple[list[Any], int]


def affine_costs(rng: np.random.Generator, n: int) -> list[Cost]:
    fixed = rng.uniform(0.0, 0.01, n).tolist()
    slope = (0.001 * 8.0 ** rng.uniform(0.0, 1.0, n)).tolist()
    return [AffineCost(fixed_s=f, per_sample_s=p) for f, p in zip(fixed, slope, strict=True)]


def gpu_costs(rng: np.random.Generator, n: int) -> list[Cost]:
    """Flat up to saturation, then linear."""
    costs: list[Cost] = []
    for saturation, slope in zip(rng.integers(4, 40, n).tolist(), rng.uniform(0.001, 0.008, n), strict=True):
        flat_s = float(slope) * saturation
        knots = (0.0, float(saturation), 2.0 * saturation)
        costs.append(PiecewiseLinearCost(samples=knots, seconds_at=(flat_s, flat_s, 2.0 * flat_s)))
    return costs


def times_us(solve: Callable[[Problem], Allocation], problems: list[Problem]) -> list[float]:
    for problem in problems[:5]:
        solve(problem)
    times: list[float] = []
    for problem in problems:
        start = time.perf_counter()
        result = solve(problem)
        times.append(1e6 * (time.perf_counter() - start))
        if not result.ok or sum(result.shares) != problem[1]:
            raise RuntimeError(f"no valid split: {result.reason or result.shares}")
    return times


def cases(rng: np.random.Generator, n: int, repeats: int) -> dict[str, list[float]]:
    total = SAMPLES_PER_RANK * n
    low, high = SAMPLES_PER_RANK // 2, 3 * SAMPLES_PER_RANK // 2
    affine: list[Problem] = [(affine_costs(rng, n), total) for _ in range(repeats)]
    gpu: list[Problem] = [(gpu_costs(rng, n), total) for _ in range(max(5, repeats // 10))]
    weights: list[Problem] = [(rng.uniform(1.0, 8.0, n).tolist(), total) for _ in range(repeats)]
    return {
        f"minimax, affine, n={n}": times_us(lambda p: minimax(p[0], p[1]), affine),
        f"minimax, affine, bounded, n={n}": times_us(
            lambda p: minimax(p[0], p[1], lower=low, upper=high), affine
        ),
        f"minimax, piecewise linear, n={n}": times_us(lambda p: minimax(p[0], p[1]), gpu),
        f"apportion, n={n}": times_us(lambda p: apportion(p[0], p[1]), weights),
    }


def figure(name: str, times: list[float]) -> dict[str, Any]:
    value, goal = statistics.median(times), GOALS_US.get(name)
    return {
        "name": name,
        "value": round(value, 2),
        "unit": "us",
        "goal": None if goal is None else f"< {goal:g}",
        "holds": None if goal is None else value < goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats (seconds)")
    quick = parser.parse_args().quick
    rng = np.random.default_rng(0)
    raw: dict[str, list[float]] = {}
    for n in RANKS:
        repeats = (20 if n >= 1000 else 100) if quick else (100 if n >= 1000 else 500)
        raw |= cases(rng, n, repeats)
    figures = [figure(name, times) for name, times in raw.items()]
    rounded = {f"{name} [us]": [round(t, 2) for t in times] for name, times in raw.items()}
    title = "Solvers: microseconds per decision"
    write_results(Path(__file__).parent, title=title, figures=figures, raw=rounded, notes=NOTES)


if __name__ == "__main__":
    main()
