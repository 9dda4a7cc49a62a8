"""The real-process half: engines on emulated devices, everything but the devices' speed real; resumable.

A run is one training of one engine on one cluster with one seed. A launch starts four ranks once and trains all runs
of a cluster that are not in the cache yet, engines interleaved seed by seed; a cluster in which a rank is killed needs
a launch per run.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.stale.simulated import geometric
from lightning_hetero import Scenario

WORLD = 4
PER_RANK = 16
SPELL_STEP_S = 0.02
ENGINES = ("ddp", "balanced", "flexible", "asp", "backup")
EMULATION = 4  # of cached results: 1 had real work on top of the emulated, 2 and 3 did not tell where time goes
SURVIVORS = ("flexible", "asp", "backup")  # what a killed rank does not end


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Four emulated devices.

    Attributes:
        name: as in the tables.
        speeds: by rank.
        spells: slow spells that come and go with time, not with training steps.
        killed: rank 3 is killed in the middle of the training.
        calm: speeds do not change.
    """

    name: str
    speeds: tuple[float, ...]
    spells: bool = False
    killed: bool = False

    @property
    def calm(self) -> bool:
        return not self.spells and not self.killed

    def scenario(self, sample_s: float, seed: int, steps: int) -> Scenario:
        """Returns the emulation; of spells a step is `SPELL_STEP_S` of time."""
        spells = {"probability": 1 / 30, "factor": 6.0, "steps": 8} if self.spells else None
        scenario = Scenario(speeds=self.speeds, sample_s=sample_s, spells=spells, seed=seed)
        return scenario.kill(rank=3, at_step=steps // 2) if self.killed else scenario


CLUSTERS = (
    Cluster(name="equal", speeds=(1.0, 1.0, 1.0, 1.0)),
    Cluster(name="1:1:1/2:1/4", speeds=(1.0, 1.0, 0.5, 0.25)),
    Cluster(name="1:1:1:1/8", speeds=(1.0, 1.0, 1.0, 0.125)),
    Cluster(name="spells", speeds=(1.0, 1.0, 1.0, 1.0), spells=True),
    Cluster(name="one killed", speeds=(1.0, 1.0, 1.0, 1.0), killed=True),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: ``sample_s`` makes a step on equal devices take about 30 ms."""

    name: str
    sample_s: float
    steps: int


TASKS = (Task(name="digits CNN", sample_s=0.0018, steps=138), Task(name="text transformer", sample_s=0.0018, steps=120))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training; its key in the cache is all of it, and how devices are emulated."""

    task: str
    cluster: str
    engine: str
    seed: int
    steps: int


def key(run: Run) -> str:
    return json.dumps({**asdict(run), "emulation": EMULATION}, sort_keys=True)


def bound_s(cluster: Cluster, task: Task, seed: int, steps: int) -> float:
    """Work-conserving bound: the time in which all devices together do the work, without waiting or transfer [s]."""
    scenario = cluster.scenario(task.sample_s, seed, steps)
    work_s = task.sample_s * PER_RANK * WORLD * steps  # of a device of speed 1
    if not cluster.spells:
        speed = sum(cluster.speeds)
        if cluster.killed:  # half of the steps with all, half with the rest
            return work_s / 2 / speed + work_s / 2 / (speed - cluster.speeds[3])
        return work_s / speed
    step, done_s = 0, 0.0
    while done_s < work_s:
        done_s += SPELL_STEP_S * sum(scenario.speed(rank, step) for rank in range(WORLD))
        step += 1
    return step * SPELL_STEP_S


def run_all(
    cache: Path, *, quick: bool, seeds: Iterable[int], engines: Iterable[str] = ENGINES, say: Any = print
) -> dict[str, dict[str, Any]]:
    """Trains what is not in the cache; returns all results by `key`.

    Args:
        cache: JSONL file, one line per run; may exist.
        quick: one task, one unequal cluster, one seed, short.
        seeds: of data order, weights and spells.
        engines: which of them.
        say: told what is about to run.
    """
    results = {entry["key"]: entry["result"] for entry in _lines(cache)}
    tasks = TASKS[:1] if quick else TASKS
    clusters = CLUSTERS[1:2] if quick else CLUSTERS
    seeds = list(seeds)[:1] if quick else list(seeds)
    for task in tasks:
        steps = 23 if quick else task.steps
        for cluster in clusters:
            runs = [
                Run(task=task.name, cluster=cluster.name, engine=engine, seed=seed, steps=steps)
                for seed in seeds
                for engine in engines
                if engine in SURVIVORS or not cluster.killed
            ]
            todo = [run for run in runs if key(run) not in results]
            for group in ([run] for run in todo) if cluster.killed else [todo] if todo else []:
                say(f"{task.name}, {cluster.name}: {len(group)} runs", flush=True)
                _launch(group, cache)
            results = {entry["key"]: entry["result"] for entry in _lines(cache)}
    return results


def _lines(cache: Path) -> Iterator[dict[str, Any]]:
    if cache.exists():
        for line in cache.read_text().splitlines():
            yield json.loads(line)


def _launch(runs: list[Run], cache: Path) -> None:
    """Starts the ranks as a cluster manager would, each by itself, so that one may die."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    environ |= {"NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.stale.worker", json.dumps([asdict(r) for r in runs]), str(cache)]
    ranks = [subprocess.Popen(command, env={**environ, "LOCAL_RANK": str(r), "RANK": str(r)}) for r in range(WORLD)]
    try:
        code = ranks[0].wait()
    finally:
        deadline = time.monotonic() + 30
        for rank in ranks:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
    if code:
        raise RuntimeError(f"rank 0 ended with code {code}; what is in the cache stays, start again to go on")


def summarize(results: dict[str, dict[str, Any]], *, quick: bool, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """Returns one row per task, cluster and engine: medians over seeds."""
    rows: list[dict[str, Any]] = []
    seeds = list(seeds)[:1] if quick else list(seeds)
    for task in TASKS:
        steps = 23 if quick else task.steps
        for cluster in CLUSTERS:
            found: dict[str, dict[int, Any]] = {engine: {} for engine in ENGINES}
            for engine, by_seed in found.items():
                for seed in seeds:
                    run = Run(task=task.name, cluster=cluster.name, engine=engine, seed=seed, steps=steps)
                    if key(run) in results:
                        by_seed[seed] = results[key(run)]
            for engine, by_seed in found.items():
                if not by_seed:
                    continue
                bounds = {seed: bound_s(cluster, task, seed, steps) for seed in by_seed}
                rows.append(_row(task, cluster, engine, by_seed, found, bounds))
    return rows


def _row(
    task: Task, cluster: Cluster, engine: str, own: dict[int, Any], found: dict[str, dict[int, Any]],
    bounds: dict[int, float],
) -> dict[str, Any]:  # fmt: skip
    def ratio(other: str, field: str) -> float | None:
        pairs = [(own[s][field], found[other][s][field]) for s in own if s in found[other]]
        return statistics.median(a / b for a, b in pairs) if pairs else None

    losses = [own[s]["loss"] / found["ddp"][s]["loss"] for s in own if s in found["ddp"]]
    median = {field: statistics.median(r[field] for r in own.values()) for field in ("fit_s", "loss", "stale_fraction")}
    return {
        "task": task.name,
        "cluster": cluster.name,
        "engine": engine,
        "seeds": len(own),
        "fit_s": median["fit_s"],
        "spread_s": max(r["fit_s"] for r in own.values()) - min(r["fit_s"] for r in own.values()),
        "p95_s": statistics.median(r["p95_s"] for r in own.values()),
        "longest_s": max(r["longest_s"] for r in own.values()),
        "taken": max(r["taken"] for r in own.values()),
        "to_ddp": ratio("ddp", "fit_s"),
        "to_balanced": ratio("balanced", "fit_s"),
        "to_bound": statistics.median(own[s]["fit_s"] / bounds[s] for s in own),
        "loss_to_ddp": geometric(losses)[0] if losses else None,
        "stale_fraction": median["stale_fraction"],
        "max_staleness": max(r["max_staleness"] for r in own.values()),
        "recomputed": statistics.median(r["recomputed"] for r in own.values()),
        "hold_s": statistics.median(r["hold_s"] for r in own.values()),
    }  # fmt: skip
