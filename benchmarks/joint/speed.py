"""Part *speed*: how long decisions take, 4 to 256 devices; processor time of one thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.joint.scenarios import OUTPUT, SAMPLES, STATE, UNEVEN, cluster_of, model_of
from benchmarks.joint.simulated.machine import Machine
from benchmarks.joint.simulated.simulator import simulate
from benchmarks.joint.simulated.traces import markov_speeds
from lightning_hetero import LyapunovController
from lightning_hetero.controller.controller import Controller
from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.solvers.placement import place

LAYERS, DWELL = 100, 20.0
SIZES = {4: 400, 16: 1200, 64: 150, 256: 60}
NOTES = (
    f"{LAYERS} layers, memory for three times a device's equal part; some device changes its speed every"
    f" {DWELL:g} batches,"
    " much more often than in the scenarios, so that there is much to decide. *Look*: a step that looks at the"
    " structure;"
    " *all*: every batch's step. Processor time, not affected by other jobs; the pure functions run in one thread."
)


class Timed:
    """Times a controller's steps."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.all_s: list[float] = []
        self.looks_s: list[float] = []

    def step(self, seen: Observation) -> Decision:
        before = self._controller.triggers.at
        start_s = time.process_time()
        decision = self._controller.step(seen)
        self.all_s.append(time.process_time() - start_s)
        if self._controller.triggers.at != before:
            self.looks_s.append(self.all_s[-1])
        return decision


def measure(quick: bool) -> dict[str, dict[str, list[float]]]:
    """Returns the times of all steps and of the looks by number of devices, roomy and capped [s]."""
    found: dict[str, dict[str, list[float]]] = {}
    for ranks, batches in SIZES.items():
        for title in ("roomy", "capped"):
            if not quick or ranks <= 16:
                found[f"{ranks} devices, {title}"] = _timed(
                    ranks, batches // (4 if quick else 1), title == "capped"
                )
    return found


def _timed(ranks: int, batches: int, capped: bool) -> dict[str, list[float]]:
    speeds = tuple(UNEVEN[i % len(UNEVEN)] for i in range(ranks))
    layers = min(LAYERS, max(1, 3 * LAYERS // ranks + 8))
    cap = layers * (STATE + 0.4 * SAMPLES * OUTPUT) if capped else float("inf")
    model, cluster = model_of(LAYERS), cluster_of(speeds, cap)
    samples = max(SAMPLES, 4 * ranks)
    plan = place(
        model, cluster, samples, budget=5, depth="low_memory" if capped else "per_link"
    )
    assert plan.ok, plan.reason
    trace = markov_speeds(ranks, batches, np.random.default_rng(3), dwell=DWELL * ranks)
    timed = Timed(LyapunovController().start(model, cluster, plan))
    simulate(timed, Machine(model, cluster), trace, plan, batches=batches)
    return {"all_s": timed.all_s, "looks_s": timed.looks_s}


def figures(raw: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, values in raw.items():
        goals = {"mean": 50.0, "p99": 100.0} if name.startswith("16 ") else {}
        for which, times in (("all", values["all_s"]), ("looks", values["looks_s"])):
            if times:
                for measure_, ms in (("mean", 1e3 * np.mean(times)), ("p99", 1e3 * np.quantile(times, 0.99))):
                    goal = goals.get(measure_)
                    found.append(
                        {
                            "name": f"{name}: {which}, {measure_} of {len(times)}",
                            "value": float(ms),
                            "unit": "ms",
                            "goal": None if goal is None else f"< {goal:g}",
                            "holds": None if goal is None else bool(ms < goal),
                        }
                    )
    return found
