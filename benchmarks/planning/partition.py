"""The split of a fixed order of devices: whether it equals brute force, how long it takes, how near bounds are."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_hetero.solvers.chain.bounds import relaxed_bound
from lightning_hetero.solvers.chain.chain import Chain
from lightning_hetero.solvers.chain.layers import Layers
from lightning_hetero.solvers.chain.model import ChainPlan, evaluate
from lightning_hetero.solvers.chain.split import Objective, split
from lightning_hetero.types import Device, Link

__all__ = ["NOTES", "figures", "measure", "run"]

NOTES = (
    "New random problems in every row; medians; milliseconds of CPU time, on one thread. Layers differ up to 9-fold in "
    "work, devices 4-fold in speed; one way over a link takes up to half a bottleneck; 4 micro-batches per stage; "
    "tolerance 1e-4. *equal cuts*: as in a transformer, every layer hands on as much; else up to 5-fold differences. "
    "*caps*: memory admits 1.3 times what the layers would need if they were dealt out by speed. *equal to brute "
    "force*: among all splits, tolerance 1e-9."
)
SIZES = ((4, 100), (16, 100), (64, 1000))
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    ", equal cuts": {"equal": True},
    ", caps": {"caps": 1.3},
    ", caps, low memory": {"caps": 1.3, "depth": "low_memory"},
    ", blocking transfers": {"overlap": False},
}
CUT_BYTES = 0.005  # the largest; a quarter of what a layer keeps on average
OBJECTIVES: tuple[Objective, ...] = ("bottleneck", "total")

Raw = dict[str, list[float]]


def chain(
    rng: np.random.Generator,
    devices: int,
    layers: int,
    *,
    equal: bool = False,
    caps: float = math.inf,
    **keywords: Any,
) -> Chain:
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
    return Chain(
        layers=Layers(
            work_s=work.tolist(),
            cut_bytes=[CUT_BYTES] * (layers + 1) if equal else (CUT_BYTES * cuts).tolist(),
            state_bytes=state.tolist(),
            activation_bytes=activations.tolist(),
        ),
        devices=[Device(name=f"d{i}", speed=f, mem_bytes=cap) for i, (f, cap) in names],
        links=links[1:devices],
        back=links[devices + 1 :],
        loop=links[0],
        loop_back=links[devices],
        **{"micro_batches": 4 * devices, **keywords},
    )


def value(plan: ChainPlan, objective: Objective) -> float:
    return plan.total_s if objective == "total" else plan.period_s


def splits(problem: Chain) -> Iterator[ChainPlan]:
    """Every split that fits."""
    n = len(problem.layers)
    for inner in itertools.combinations(range(1, n), len(problem) - 1):
        plan = evaluate(problem, (0, *inner, n))
        if plan.ok:
            yield plan


def measure(quick: bool = False) -> Raw:
    """Returns times and ratios by the name of their case."""
    raw: Raw = {}
    for row, (kind, keywords) in enumerate(KINDS.items()):
        rng = np.random.default_rng([3, row])
        cases = (small(rng, **keywords) for _ in range(10 if quick else 60))
        raw[f"equal to brute force{kind}"] = [float(_is_best(case)) for case in cases]
    for row, (devices, layers) in enumerate(SIZES):
        for kind, keywords in KINDS.items():
            rng = np.random.default_rng([4, row])
            _time(raw, f"{devices} x {layers}{kind}", rng, devices, layers, 5 if quick else 20, keywords)
    rng = np.random.default_rng([4, len(SIZES)])
    _time(raw, "1000 x 4000", rng, 1000, 4000, 1 if quick else 3, {})
    return raw


def small(rng: np.random.Generator, **keywords: Any) -> Chain:
    """Draws a problem that brute force can do; few layers per device leave no split far from memory's limits."""
    devices = int(rng.integers(2, 5))
    problem = chain(rng, devices, int(rng.integers(devices + 2, 11)), **keywords)
    spread = [replace(d, mem_bytes=d.mem_bytes * float(rng.uniform(0.8, 2.0))) for d in problem.devices]
    return replace(problem, devices=spread)


def _is_best(problem: Chain) -> bool:
    known = list(splits(problem))
    for objective in OBJECTIVES:
        plan = split(problem, objective=objective, tolerance=1e-9)
        if plan.ok != bool(known):
            return False
        if known and value(plan, objective) > min(value(p, objective) for p in known) * (1.0 + 1e-8):
            return False
    return True


def _time(
    raw: Raw,
    name: str,
    rng: np.random.Generator,
    devices: int,
    layers: int,
    repeats: int,
    keywords: dict[str, Any],
) -> None:
    problems = [chain(rng, devices, layers, **keywords) for _ in range(repeats + 1)]
    found: dict[Objective, list[ChainPlan]] = {}
    for objective in OBJECTIVES:
        split(replace(problems[0]), objective=objective)  # warm-up
        elapsed: list[float] = []
        found[objective] = []
        for problem in problems[1:]:
            new = replace(
                problem, layers=replace(problem.layers)
            )  # nothing is remembered from the other objective
            start = time.process_time()
            plan = split(new, objective=objective)
            elapsed.append(1e3 * (time.process_time() - start))
            found[objective].append(plan)
        raw[f"{name}: {objective} [ms]"] = elapsed
    pairs = [(a, b) for a, b in zip(found["bottleneck"], found["total"], strict=True) if b.ok]
    raw[f"{name}: total of the best bottleneck / best total"] = [a.total_s / b.total_s for a, b in pairs]
    bounds = [
        relaxed_bound(problem) for problem, a in zip(problems[1:], found["bottleneck"], strict=True) if a.ok
    ]
    raw[f"{name}: best bottleneck / relaxed bound"] = [
        a.period_s / bound for (a, _), bound in zip(pairs, bounds, strict=True)
    ]


def figures(raw: Raw) -> list[dict[str, Any]]:
    """Returns the table: medians, with goals where the planner depends on them."""
    table: list[dict[str, Any]] = []
    for case, values in raw.items():
        if not values:
            continue
        if case.startswith("equal"):
            row = {
                "name": case,
                "value": int(sum(values)),
                "unit": f"of {len(values)}",
                "goal": f"{len(values)}",
            }
            table.append({**row, "holds": sum(values) == len(values)})
            continue
        middle = statistics.median(values)
        timed = case.endswith(" [ms]")
        limit = 50.0 if case.startswith("64 x 1000") else None
        limit = 15_000.0 if case.startswith("1000") else limit
        goal = f"< {limit:g}" if timed and limit else None
        row = {"name": case.removesuffix(" [ms]"), "value": round(middle, 5), "unit": "ms" if timed else "x"}
        table.append({**row, "goal": goal, "holds": middle < limit if timed and limit else None})
    return table


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and returns the figures.

    Args:
        quick: fewer problems (seconds).
    """
    return figures(measure(quick))
