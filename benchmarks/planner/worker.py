"""One rank: trains one case by its engines, as planned, and notes what steps take; started by torchrun."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.balanced.busy import Products, Sequences, pin, usable_cores
from benchmarks.emulated import Emulated
from benchmarks.kit.training import Clock, fit, gathered, gloo
from benchmarks.pipeline.devices import LinkedDevices
from benchmarks.planner.cases import CASES, STEPS, Net, loader
from benchmarks.planner.cases import WARM_UP as CASE_WARM_UP
from benchmarks.planner.published import CONTENDED, ENGINES, SETUPS, SHARED, WARM_UP
from benchmarks.torchrun import as_rank
from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.solvers.plans import plan_from_plain

CONTENDED_BATCH, CONTENDED_STEPS = 96, 30
CLASSES: dict[str, Any] = {
    "ddp": DDPStrategy,
    "balanced": LoadBalancedStrategy,
    "stale": BoundedStalenessStrategy,
    "pipeline": HeteroPipelineStrategy,
}


def step_s(clock: Clock, first: int, *, mean: bool) -> float:
    """Returns a step from ``first`` on, of the rank that is last each time: the median, or the mean. Collective."""
    ends = gathered(clock.ends_s)
    over = [max(step) for step in zip(*ends, strict=True)]
    steps = [b - a for a, b in zip(over[first - 1 :], over[first:], strict=False)]
    return statistics.fmean(steps) if mean else statistics.median(steps)


def train(name: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Trains a case as the planner's overrides would; returns the time of a step, and how true the emulation was."""
    case = next(case for case in CASES if case.name == setting["name"])
    clock, emulated, options = Clock(), Emulated(case.scenario), dict[str, Any]()
    if name == "pipeline":
        options = {
            "backbone": "model", "controller": None, "plan": plan_from_plain(setting["plan"]),
            "profile": model_from_plain(setting["profile"]),
            "cluster": {"devices": [{"speed": v} for v in case.scenario.speeds]},
        }  # fmt: skip
    fit(gloo(CLASSES[name], **options), Net(), loader(dist.get_world_size()), steps=STEPS, callbacks=[clock, emulated])
    if name == "stale":  # ranks pass ticks in bursts: only the whole tells
        own_s = (clock.ends_s[-1] - clock.ends_s[CASE_WARM_UP]) / (len(clock.ends_s) - 1 - CASE_WARM_UP)
        found_s = statistics.fmean(gathered(own_s))
    else:
        found_s = step_s(clock, CASE_WARM_UP, mean=False)
    return {"step_s": found_s, "taken": max(gathered(emulated.taken()))}


def publish(name: str, setting: dict[str, Any], rank: int) -> dict[str, Any]:
    """Trains a published set-up by emulation."""
    one = next(one for one in SETUPS if one.name == setting["name"])
    setup, steps, ranks = one.make(), one.length(setting["quick"]), dist.get_world_size()
    exchange_s = one.scale * setup.exchange()
    scenario = one.scenario(rank)
    exchange = {(1.0,) * ranks: exchange_s} if exchange_s else {}
    clock, emulated = Clock(), LinkedDevices(scenario, exchange)
    data = loader(ranks, setup.global_batch // ranks, steps)
    fit(_engine(name, setup.min_samples), Net(), data, steps=steps, callbacks=[clock, emulated])
    found_s = step_s(clock, WARM_UP, mean=bool(setup.slowness))
    return {"step_s": found_s, "taken": max(gathered(emulated.taken()))}


def contend(rank: int, quick: bool) -> dict[str, Any]:
    """Trains on two cores, three ranks on one of them; returns steps, and what samples take on a core alone."""
    alone = _alone() if rank == SHARED else None
    dist.barrier()
    found: dict[str, Any] = {"alone": gathered(alone)[SHARED], "global_batch": CONTENDED_BATCH * (SHARED + 1)}
    steps = WARM_UP + (6 if quick else CONTENDED_STEPS)
    for name in ENGINES:
        clock, callbacks = Clock(), list[Callback]()
        model: LightningModule = Products()
        data = DataLoader(
            Sequences(CONTENDED_BATCH * (SHARED + 1) * (steps + 1)), batch_size=CONTENDED_BATCH, shuffle=True
        )
        fit(_engine(name, None), model, data, steps=steps, callbacks=[clock, *callbacks])
        found[name] = {"step_s": step_s(clock, WARM_UP, mean=False)}
    return found


def _engine(name: str, min_samples: int | None) -> Any:
    return gloo(CLASSES[name], **({"min_samples": min_samples} if name == "balanced" else {}))


def _alone() -> list[float]:
    """Returns the fixed time of a step and that per sample on this rank's core while nobody else computes [s]."""
    model, sizes, seconds = Products(), (CONTENDED_BATCH, 2 * CONTENDED_BATCH), list[float]()
    data = Sequences(2 * CONTENDED_BATCH)
    for size in sizes:
        times: list[float] = []
        batch = next(iter(DataLoader(data, batch_size=size)))
        for _ in range(5):
            before_s = time.perf_counter()
            model.training_step(batch, 0).backward()
            times.append(time.perf_counter() - before_s)
        seconds.append(statistics.median(times[1:]))
    cost = fit_affine(sizes, seconds)
    return [cost.fixed_s, cost.per_sample_s]


def measure(rank: int, setting: dict[str, Any]) -> dict[str, Any]:
    if setting["name"] == CONTENDED:
        return contend(rank, setting["quick"])
    if "engines" in setting:
        return {name: train(name, setting) for name in setting["engines"]}
    return {name: publish(name, setting, rank) for name in ENGINES}


if __name__ == "__main__":
    _setting = json.loads(sys.argv[2])
    if _setting["name"] == CONTENDED:  # before there are other threads
        pin([usable_cores()[int(int(os.environ["LOCAL_RANK"]) == SHARED)]])
    as_rank(Path(sys.argv[1]), lambda rank: measure(rank, _setting))
