"""The real-process half: engines on emulated devices, everything but the devices' speed real; no torch.

A run is one training of one engine on one cluster with one seed. A launch starts four ranks once and trains all runs
of a case, engines interleaved seed by seed; where a rank is killed, a launch per run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kit.figures import geometric
from benchmarks.ranks import apart
from lightning_hetero import Scenario

WORLD = 4
PER_RANK = 16
SPELL_STEP_S = 0.02
ENGINES = ("ddp", "balanced", "flexible")
SURVIVORS = ("flexible",)  # what a killed rank does not end
SEEDS = (0, 1, 2)
QUICK_STEPS = 23
LIMIT_S = 1200.0
Run = dict[str, Any]


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


def measure(task: Task, cluster: Cluster, quick: bool = False) -> list[Run]:
    """Trains by each engine and seed; returns what rank 0 saw of each run, with ``engine`` and ``seed``.

    Raises:
        RuntimeError: a rank failed that was not to be killed.
    """
    engines = SURVIVORS if cluster.killed else ENGINES
    steps = QUICK_STEPS if quick else task.steps
    runs = [{"engine": engine, "seed": seed} for seed in (SEEDS[:1] if quick else SEEDS) for engine in engines]
    groups = [[run] for run in runs] if cluster.killed else [runs]
    found: list[Run] = []
    for group in groups:
        setting = json.dumps({"task": task.name, "cluster": cluster.name, "steps": steps, "runs": group})
        found += apart("benchmarks.stale.worker", WORLD, setting, limit_s=LIMIT_S, needed=(0,))[0]
    return found


def rows_of(task: Task, cluster: Cluster, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns one row per engine: medians over seeds."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run["engine"], {})[run["seed"]] = run
    return [_row(task, cluster, engine, found) for engine in found]


def _row(
    task: Task, cluster: Cluster, engine: str, found: Mapping[str, Mapping[int, Run]]
) -> dict[str, Any]:
    own, ddp, balanced = found[engine], found.get("ddp", {}), found.get("balanced", {})

    def ratio(other: Mapping[int, Run]) -> float | None:
        ratios = [own[s]["fit_s"] / other[s]["fit_s"] for s in own if s in other]
        return statistics.median(ratios) if ratios else None

    def median(field: str) -> float:
        return statistics.median(run[field] for run in own.values())

    def most(field: str) -> float:
        return max(run[field] for run in own.values())

    losses = [own[s]["loss"] / ddp[s]["loss"] for s in own if s in ddp]
    return {
        "task": task.name,
        "cluster": cluster.name,
        "engine": engine,
        "seeds": len(own),
        "fit_s": median("fit_s"),
        "spread_s": most("fit_s") - min(run["fit_s"] for run in own.values()),
        "p95_s": median("p95_s"),
        "longest_s": most("longest_s"),
        "taken": most("taken"),
        "to_ddp": ratio(ddp),
        "to_balanced": ratio(balanced),
        "to_bound": statistics.median(
            run["fit_s"] / bound_s(cluster, task, seed, run["steps"]) for seed, run in own.items()
        ),
        "loss_to_ddp": geometric(losses)[0] if losses else None,
        "stale_fraction": median("stale_fraction"),
        "max_staleness": most("max_staleness"),
        "recomputed": median("recomputed"),
        "hold_s": median("hold_s"),
        **({"time_in_parts_s": own[min(own)]["parts_s"]} if engine not in ("ddp", "balanced") else {}),
    }
