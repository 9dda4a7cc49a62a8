"""The split of a fixed order of devices: how near it is to brute force, and how long it takes."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_hetero.solvers.chain.chain import DeviceChain
from lightning_hetero.solvers.chain.layers import Layers
from lightning_hetero.solvers.chain.model import ChainPlan, evaluate
from lightning_hetero.solvers.chain.split import split
from lightning_hetero.types import Device, Link

NOTES = (
    "New random problems in every row; medians; milliseconds of CPU time, on one thread. Layers differ up to 9-fold in "
    "work, devices 4-fold in speed; one way over a link takes up to half a bottleneck; 4 micro-batches per stage. "
    "*equal cuts*: as in a transformer, every layer hands on as much; else up to 5-fold differences. "
    "*caps*: memory admits 1.3 times what the layers would need if they were dealt out by speed. *gap*: "
    "modelled total over that of the best of all splits - 1."
)
SIZES = ((4, 100), (16, 100), (64, 1000))
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    ", equal cuts": {"equal": True},
    ", caps": {"caps": 1.3},
    ", caps, low memory": {"caps": 1.3, "depth": "low_memory"},
}
CUT_BYTES = 0.005  # the largest; a quarter of what a layer keeps on average

Raw = dict[str, list[float]]


def chain(
    rng: np.random.Generator,
    devices: int,
    layers: int,
    *,
    equal: bool = False,
    caps: float = math.inf,
    **keywords: Any,
) -> DeviceChain:
    """Draws a pipeline in a random order of devices."""
    work, speeds = rng.uniform(0.2, 1.8, layers), rng.choice([1.0, 0.5, 0.25], devices)
    state, activations = rng.uniform(0.5, 1.5, layers), rng.uniform(0.01, 0.03, layers)
    ideal_s = float(work.sum() / speeds.sum())
    depths = 2.0 + 2.0 * np.arange(devices, 0, -1)
    fair = speeds / speeds.sum() * (state.sum() + depths * activations.sum()) + depths * CUT_BYTES
    cuts = rng.uniform(0.2, 1.0, layers + 1)
    most_s = rng.uniform(0.01, 0.5, 2 * devices) * ideal_s  # the largest cut, one way
    links = [Link(bandwidth_bytes_per_s=CUT_BYTES / float(t)) for t in most_s]
    names = enumerate(zip(speeds.tolist(), (caps * fair).tolist(), strict=True))
    return DeviceChain(
        layers=Layers(
            work_s=work.tolist(),
            cut_bytes=[CUT_BYTES] * (layers + 1) if equal else (CUT_BYTES * cuts).tolist(),
            state_bytes=state.tolist(),
            activation_bytes=activations.tolist(),
        ),
        devices=[Device(name=f"d{i}", speed=f, mem_bytes=cap) for i, (f, cap) in names],
        links=[*links[1:devices], links[0]],
        back=[*links[devices + 1 :], links[devices]],
        **{"micro_batches": 4 * devices, **keywords},
    )


def splits(problem: DeviceChain) -> Iterator[ChainPlan]:
    """Every split that fits."""
    n = len(problem.layers)
    for inner in itertools.combinations(range(1, n), len(problem) - 1):
        plan = evaluate(problem, (0, *inner, n))
        if plan.ok:
            yield plan


def measure(quick: bool = False) -> Raw:
    """Returns gaps and times by the name of their case."""
    raw: Raw = {}
    for row, (kind, keywords) in enumerate(KINDS.items()):
        rng = np.random.default_rng([3, row])
        cases = (small(rng, **keywords) for _ in range(10 if quick else 60))
        raw[f"small{kind}: gap"] = [found for case in cases if (found := _gap(case)) is not None]
    for row, (devices, layers) in enumerate(SIZES):
        for kind, keywords in KINDS.items():
            rng = np.random.default_rng([4, row])
            cases = [chain(rng, devices, layers, **keywords) for _ in range(6 if quick else 21)]
            raw[f"{devices} x {layers}{kind} [ms]"] = _times_ms(cases)
    return raw


def small(rng: np.random.Generator, **keywords: Any) -> DeviceChain:
    """Draws a problem that brute force can do; few layers per device leave no split far from memory's limits."""
    devices = int(rng.integers(2, 5))
    problem = chain(rng, devices, int(rng.integers(devices + 2, 11)), **keywords)
    spread = [replace(d, mem_bytes=d.mem_bytes * float(rng.uniform(0.8, 2.0))) for d in problem.devices]
    return replace(problem, devices=spread)


def _gap(problem: DeviceChain) -> float | None:
    known, plan = [found.total_s for found in splits(problem)], split(problem)
    if plan.ok != bool(known):
        raise RuntimeError("a split was found where there is none, or the other way around")
    return plan.total_s / min(known) - 1.0 if known else None


def _times_ms(problems: list[DeviceChain]) -> list[float]:
    elapsed: list[float] = []
    for problem in problems:
        start = time.process_time()
        split(problem)
        elapsed.append(1e3 * (time.process_time() - start))
    return elapsed[1:]  # the first one warms up


def figures(raw: Raw) -> list[dict[str, Any]]:
    """Returns the table: mean and largest gaps, medians of times."""
    table: list[dict[str, Any]] = []
    for case, values in raw.items():
        if case.endswith(": gap") and values:
            mean, most = 100.0 * statistics.fmean(values), 100.0 * max(values)
            table.append({"name": f"{case}, mean of {len(values)}", "value": round(mean, 4), "unit": "%",
                          "goal": "<= 0.5", "holds": mean <= 0.5})  # fmt: skip
            table.append({"name": f"{case}, largest", "value": round(most, 4), "unit": "%",
                          "goal": None, "holds": None})  # fmt: skip
        elif values:
            middle = statistics.median(values)
            table.append({"name": case.removesuffix(" [ms]"), "value": round(middle, 3), "unit": "ms",
                          "goal": None, "holds": None})  # fmt: skip
    return table


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and returns the figures.

    Args:
        quick: fewer problems (seconds).
    """
    return figures(measure(quick))
