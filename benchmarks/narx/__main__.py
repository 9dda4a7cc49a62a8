"""Which orders and sizes the network of `Narx` has, and where it pays. Pure: generated series, no processes.

- *error*: mean of |log(true time / forecast)| one step ahead, noise left out of the truth, over the Kalman filter's.
- *time*: four ranks, each with a series of its own, shares decided by the policy as in training; total time over that
  of the best shares of each step.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.narx.series import RELATED, SERIES, Step, series
from benchmarks.report import write_results
from lightning_hetero import BalancePolicy
from lightning_hetero.balanced.decide.controller import Row, ShareController, shares_digest
from lightning_hetero.predictors import Ewma, Kalman, LastValue, Narx, Predictor
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.solvers import minimax
from lightning_hetero.types import AffineCost

FIXED_S, PER_SAMPLE_S = 0.009, 0.003
RANKS, BATCH = 4, 64
LEARNT = 100  # steps before errors count

PREDICTORS: Mapping[str, Callable[[], Predictor]] = {
    "kalman": Kalman,
    "narx": Narx,
    "ewma": Ewma,
    "last": LastValue,
}
VARIANTS: Mapping[str, Callable[[], Predictor]] = {
    "zone 0": lambda: Narx(zone=0.0),
    "zone 0.2": lambda: Narx(zone=0.2),
    "margin 0": lambda: Narx(margin=0.0),
}
NOTES = (
    "*error*: one step ahead, of a rank's time without its noise, over the Kalman filter's; the first 100 steps do not"
    " count. *time*: of four ranks in a closed loop with the policy's defaults, over that of the best shares of each"
    " step; all steps count. Means over seeds. Series: `benchmarks/narx/series.py`; in those named *announced* the load"
    " is told one step before the time shows it, in the other ones together with the time."
)


def seconds(step: Step, samples: int) -> float:
    return step.slow * (FIXED_S + PER_SAMPLE_S * samples)


def forecast_error(predictor: Predictor, steps: Sequence[Step], seed: int) -> float:
    """Returns the mean error of the forecasts, with shares that move a little."""
    rng, errors = Random(seed), list[float]()
    for k, step in enumerate(steps):
        samples = rng.randint(12, 20)
        true_s = seconds(step, samples)
        if k >= LEARNT:
            errors.append(abs(math.log(true_s / predictor.predict(samples))))
        predictor.told(free_cpu=step.free_cpu, free_mem=step.free_mem)
        predictor.update(samples, true_s * step.noise)
    return fmean(errors)


def closed_loop(predictor: Predictor | None, ranks: Sequence[Sequence[Step]]) -> float:
    """Returns the time of all steps over that of the best shares; ``predictor`` None: equal shares."""
    policy = BalancePolicy(predictor=predictor or Kalman())
    bounds = ShareBounds()
    policy.start(world_size=RANKS, total=BATCH, bounds=bounds)
    controller = ShareController(policy, rank=0, world_size=RANKS)
    low, up = bounds.resolve(RANKS, BATCH, 1)
    total_s = best_s = 0.0
    for k, steps in enumerate(zip(*ranks, strict=True)):
        shares = controller.full_shares(0, k) if predictor else (BATCH // RANKS,) * RANKS
        times = [seconds(step, n) * step.noise for step, n in zip(steps, shares, strict=True)]
        costs = [AffineCost(fixed_s=step.slow * FIXED_S, per_sample_s=step.slow * PER_SAMPLE_S) for step in steps]
        best = minimax(costs, BATCH, lower=low, upper=up).shares
        total_s += max(times)
        best_s += max(seconds(step, n) * step.noise for step, n in zip(steps, best, strict=True))
        if predictor:
            rows = [_row(k, step, n, s, shares) for step, n, s in zip(steps, shares, times, strict=True)]
            controller.sent(0, k, lambda rows=rows: rows)
            controller.catch_up()
    return total_s / best_s


def _row(k: int, step: Step, samples: int, compute_s: float, shares: Sequence[int]) -> Row:
    return Row(
        epoch=0.0,
        step=float(k),
        samples=float(samples),
        compute_s=compute_s,
        wait_s=0.0,
        digest=float(shares_digest(0, k, shares)),
        batches=1.0,
        work=math.nan,
        free_cpu=step.free_cpu,
        free_mem=step.free_mem,
        most_samples=math.nan,
    )


def update_us(predictor: Predictor, steps: Sequence[Step]) -> float:
    """Returns the processor time of a record and a question [us], the median of ten parts."""
    parts: list[float] = []
    for first in range(0, len(steps), len(steps) // 10):
        part = steps[first : first + len(steps) // 10]
        started_s = time.process_time()
        for step in part:
            predictor.told(free_cpu=step.free_cpu, free_mem=step.free_mem)
            predictor.update(16, seconds(step, 16) * step.noise)
            predictor.predict(16)
        parts.append((time.process_time() - started_s) / len(part) * 1e6)
    return sorted(parts)[len(parts) // 2]


def errors_of(makers: Mapping[str, Callable[[], Predictor]], seeds: range, steps: int) -> dict[str, dict[str, float]]:
    return {
        name: {kind: fmean(forecast_error(make(), series(kind, s, steps), s) for s in seeds) for kind in SERIES}
        for name, make in makers.items()
    }


def loops_of(seeds: range, steps: int) -> dict[str, dict[str, float]]:
    makers = {"equal shares": lambda: None, **PREDICTORS}
    return {
        name: {kind: fmean(closed_loop(make(), _ranks(kind, s, steps)) for s in seeds) for kind in SERIES}
        for name, make in makers.items()
    }


def _ranks(kind: str, seed: int, steps: int) -> list[list[Step]]:
    return [series(kind, RANKS * seed + rank, steps) for rank in range(RANKS)]


def figures_of(errors: Mapping[str, Any], loops: Mapping[str, Any], cost_us: float) -> Iterator[dict[str, Any]]:
    for kind in SERIES:
        value = errors["narx"][kind] / errors["kalman"][kind]
        goal = 0.95 if kind in RELATED else 1.05
        yield _figure(f"{kind}: error, narx over kalman", value, goal)
    for kind in SERIES:
        yield _figure(f"{kind}: time, narx over kalman", loops["narx"][kind] / loops["kalman"][kind], 1.02)
    yield {"name": "narx: a record", "value": cost_us, "unit": "us", "goal": "<= 200", "holds": cost_us <= 200.0}


def _figure(name: str, value: float, goal: float) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "1", "goal": f"<= {goal:g}", "holds": value <= goal}


def table(title: str, values: Mapping[str, Mapping[str, float]], over: Mapping[str, float] | None = None) -> str:
    rows = [f"| {title} | " + " | ".join(values) + " |", "|---" * (len(values) + 1) + "|"]
    for kind in SERIES:
        base = over[kind] if over else 1.0
        rows.append(f"| {kind} | " + " | ".join(f"{one[kind] / base:.2f}" for one in values.values()) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.narx", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    seeds, steps = range(1 if args.quick else 5), 600
    errors = errors_of({**PREDICTORS, **VARIANTS}, seeds, steps)
    loops = loops_of(seeds, steps)
    cost_us = update_us(Narx(), series("load", 0, 2000))
    known = errors["kalman"]
    notes = [NOTES, table("error over kalman's", {k: v for k, v in errors.items() if k in PREDICTORS}, known)]
    notes += [table("the same, of narx with", {k: errors[k] for k in VARIANTS}, known), table("time", loops)]
    write_results(
        args.out,
        title="NARX: a network that knows the host's load",
        figures=[*figures_of(errors, loops, cost_us)],
        raw={"error": errors, "time": loops, "us": cost_us},
        notes="\n\n".join(notes),
    )


if __name__ == "__main__":
    main()
