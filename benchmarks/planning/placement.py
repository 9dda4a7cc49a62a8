"""How good plans are, and how long planning takes.

Small cases are solved by trying everything; of large ones the gap to a lower bound is an upper limit of what is lost.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.planning.brute_force import BruteForce
from benchmarks.planning.cases import large_case, small_case
from lightning_hetero.solvers.placement import place

NOTES = (
    "*gap*: modelled time of a batch / that of the best plan - 1; the best of all subsets, groups, orders, borders, "
    "micro-batches and shares (6-12 samples). *sync light, medium, heavy*: all gradients over a slow link take 2, 20, "
    "100 % of the batch at full speed. *capped*: a device's memory holds 30-120 % of the model. *above bound*: "
    "modelled time / (all work / all speed) - 1; islands of 8 devices of three speeds. *fits 1/8*: a "
    "device holds an eighth of the model's state. Seconds are CPU time of the "
    "one thread that plans, the best of the repeats."
)
SYNC = {"light": 0.02, "medium": 0.2, "heavy": 1.0}
SIZES = (1, 2, 3, 4, 6, 8, 12)
SMALL = ((3, 7, 20, 5), (4, 7, 20, 2), (5, 7, 10, 0))  # devices, layers, cases, cases if quick
# devices, layers, most groups, part of the model that fits, repeats, quick too; limit [s]
LARGE: dict[str, tuple[int, int, int | None, float, int, bool, float | None]] = {
    "16 x 100": (16, 100, None, math.inf, 3, True, None),
    "16 x 100, fits 1/4": (16, 100, None, 1 / 4, 3, True, None),
    "6 x 400, fits 1/3": (6, 400, None, 1 / 3, 3, True, 10.0),
    "64 x 1,000, one chain": (64, 1000, 1, math.inf, 3, True, 10.0),
    "64 x 1,000": (64, 1000, None, math.inf, 3, True, 10.0),
    "64 x 1,000, fits 1/8": (64, 1000, None, 1 / 8, 3, True, 10.0),
    "1,000 x 4,000": (1000, 4000, None, math.inf, 1, False, 60.0),
    "1,000 x 4,000, fits 1/32": (1000, 4000, None, 1 / 32, 1, False, 60.0),
}

Raw = dict[str, list[float]]


def measure(quick: bool = False) -> Raw:
    """Returns gaps and times, by case."""
    raw: Raw = {}
    for devices, layers, full, few in SMALL:
        for name, sync in SYNC.items():
            for capped in (False, True):
                case = f"{devices} devices, sync {name}{', capped' if capped else ''}: gap"
                gaps = [
                    gap
                    for seed in range(few if quick else full)
                    if (gap := _gap(np.random.default_rng([seed, devices, 7]), devices, layers, sync, capped))
                    is not None
                ]
                if gaps:
                    raw[case] = gaps
    for name, (devices, layers, most, fits, repeats, short, _) in LARGE.items():
        if short or not quick:
            times_s, gap = _timed(devices, layers, most, fits, 1 if quick else repeats)
            raw[f"{name}: time [s]"] = times_s
            raw[f"{name}: above bound"] = [gap]
    return raw


def _gap(rng: np.random.Generator, devices: int, layers: int, sync: float, capped: bool) -> float | None:
    case = small_case(rng, devices, layers, sync=sync, capped=capped)
    sizes = [size for size in SIZES if size <= case.samples]
    best_s, _ = BruteForce(case.model, case.cluster, case.samples, sizes).best()
    plan = place(case.model, case.cluster, case.samples, micro_samples=sizes)
    if best_s == math.inf:
        if plan.ok:
            raise RuntimeError("a plan was found where there is none")
        return None
    return plan.total_s / best_s - 1.0


def _timed(
    devices: int, layers: int, most: int | None, fits: float, repeats: int
) -> tuple[list[float], float]:
    case = large_case(np.random.default_rng(0), devices, layers, fits=fits)
    times_s: list[float] = []
    gap = math.inf
    for _ in range(repeats):
        start = time.process_time()
        plan = place(case.model, case.cluster, case.samples, max_groups=most)
        times_s.append(time.process_time() - start)
        if not plan.ok:
            raise RuntimeError(f"no plan: {plan.reason}")
        gap = plan.total_s / plan.lower_bound_s - 1.0
    return times_s, gap


def figures(raw: Raw) -> list[dict[str, Any]]:
    """Returns the table: mean and largest gap, how often there is none, gaps to bounds, times."""
    table: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, limit: float | None = None) -> None:
        goal = None if limit is None else f"<= {limit:g}"
        holds = None if limit is None else value <= limit
        table.append({"name": name, "value": round(value, 4) + 0.0, "unit": unit, "goal": goal, "holds": holds})

    for case, values in raw.items():
        name, _, what = case.partition(": ")
        if what == "gap":
            add(f"{name}, no gap", sum(gap < 1e-6 for gap in values), f"of {len(values)}")
            add(f"{name}, mean gap", 100.0 * statistics.fmean(values), "%", 0.5)
            add(f"{name}, largest gap", 100.0 * max(values), "%")
        elif what == "above bound":
            add(f"{name}, above bound", 100.0 * values[0], "%")
        else:
            add(name, min(values), "s", LARGE[name][-1])
    return table


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and returns the figures.

    Args:
        quick: fewer and smaller cases.
    """
    return figures(measure(quick))
