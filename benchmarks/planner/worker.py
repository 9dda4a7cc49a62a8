"""One rank: trains one case by its engines, as planned, and notes what steps take."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.balanced.busy import Products, Sequences, pin, usable_cores
from benchmarks.emulated import Emulated
from benchmarks.kit.training import Clock, fit, forgetting, gathered, gloo
from benchmarks.pipeline.devices import LinkedDevices
from benchmarks.planner.cases import CASES, STEPS, Net, loader
from benchmarks.planner.models import MODELS
from benchmarks.planner.published import BOOKKEEPING, CONTENDED, ENGINES, SETUPS, SHARED, WARM_UP
from benchmarks.ranks import as_rank
from lightning_hetero import AutoStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.cluster.engine_times import LOOPS
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.plan.estimate import EngineName
from lightning_hetero.plan.planner import plan
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.solvers.plans import plan_from_plain

CONTENDED_BATCH, CONTENDED_STEPS = 96, 30
SHORT, LONG = 40, 240  # steps that compute next to nothing
CLASSES: dict[str, Any] = {
    "ddp": DDPStrategy, "balanced": LoadBalancedStrategy, "stale": BoundedStalenessStrategy,
    "pipeline": HeteroPipelineStrategy, "auto": AutoStrategy,
}  # fmt: skip


def step_s(clock: Clock, first: int, *, mean: bool) -> float:
    """Returns a step from ``first`` on, of the slowest rank: the median, or the mean. Collective."""
    steps_s = [b - a for a, b in pairwise(clock.ends_s[first - 1 :])]
    return max(gathered(statistics.fmean(steps_s) if mean else statistics.median(steps_s)))


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
    # Under the stale engine ranks pass ticks in bursts: only the whole tells.
    return {"step_s": step_s(clock, WARM_UP, mean=name == "stale"), "taken": max(gathered(emulated.taken()))}


def publish(name: str, setting: dict[str, Any], rank: int) -> dict[str, Any]:
    """Trains a published set-up by emulation."""
    one = next(one for one in SETUPS if one.name == setting["name"])
    setup, steps, ranks = one.make(), one.length(setting["quick"]), dist.get_world_size()
    exchange_s = one.scale * setup.exchange()
    clock, emulated = Clock(), LinkedDevices(one.scenario(rank), {(1.0,) * ranks: exchange_s} if exchange_s else {})
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
        clock, model = Clock(), Products()
        data = DataLoader(
            Sequences(CONTENDED_BATCH * (SHARED + 1) * (steps + 1)), batch_size=CONTENDED_BATCH, shuffle=True
        )
        fit(_engine(name, None), model, data, steps=steps, callbacks=[clock])
        found[name] = {"step_s": step_s(clock, WARM_UP, mean=False)}
    return found


def real(name: str, engines: Sequence[EngineName], quick: bool) -> dict[str, Any]:
    """Trains a model by `AutoStrategy`, then by each engine: nothing is emulated and nothing told.

    Returns:
        The steps, as the trial's plan has them and as they came; a pipeline's plan is from what it has measured itself.
    """
    model, ranks = next(one for one in MODELS if one.name == name), dist.get_world_size()
    steps, found = WARM_UP + (6 if quick else 30), dict[str, Any]()

    def trained_s(strategy: Any) -> float:
        clock, data = Clock(), model.dataset(model.per_rank * ranks * (steps + 1))
        with forgetting():
            fit(strategy, model.make(), DataLoader(data, batch_size=model.per_rank), steps=steps, callbacks=[clock])
        return step_s(clock, WARM_UP, mean=True)

    auto: Any = gloo(AutoStrategy, engines=[f"hetero_{name}" for name in engines if name != "ddp"])
    auto_s = trained_s(auto)
    said, setup = auto.choice.plan, auto.choice.plan.setup
    for engine in engines:
        strategy: Any = gloo(CLASSES[engine], **({"backbone": "layers"} if engine == "pipeline" else {}))
        found[engine] = {"step_s": trained_s(strategy)}
        if engine == "pipeline":
            own = strategy.planned
            setup = replace(setup, cluster=own.cluster, model=own.model, costs=(), slowness=())
        found[engine]["planned_s"] = plan(setup, [engine]).estimates[0].step_s
    found["auto"] = {"step_s": auto_s, "planned_s": said.chosen.step_s, "took": auto.choice.engine,
                     "gain": found["ddp"]["step_s"] / auto_s, "planned_gain": said.gain}  # fmt: skip
    return found


def bookkeeping() -> dict[str, list[float]]:
    """Returns the processor time of a step that computes next to nothing under each engine, its server's included, over
    that of Lightning on one device; in turns."""
    found: dict[str, list[float]] = {engine: [] for engine in LOOPS}
    for _ in range(5):
        alone_s = _used_s("", 1)
        for engine, ratios in found.items():
            ratios.append(_used_s(engine, dist.get_world_size()) / alone_s)
    return found


def _used_s(engine: str, ranks: int) -> float:
    """Returns rank 0's processor time of a step, and its children's: of a long fit, without what a short one takes."""
    used_s = list[float]()
    for steps in (SHORT, LONG):
        began_s = _process_s()
        strategy: Any = gloo(CLASSES[engine]) if ranks > 1 else "auto"
        torch.manual_seed(0)  # the same data on all ranks
        data = RandomDataset(32, steps * ranks)
        fit(strategy, BoringModel(), DataLoader(data), steps=steps, callbacks=[], ranks=ranks)
        used_s.append(_process_s() - began_s)
    return (used_s[1] - used_s[0]) / (LONG - SHORT)


def _process_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


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
    if setting["name"] == BOOKKEEPING:
        return bookkeeping()
    if "real" in setting:
        return real(setting["name"], setting["engines"], setting["quick"])
    if "engines" in setting:
        return {name: train(name, setting) for name in setting["engines"]}
    return {name: publish(name, setting, rank) for name in ENGINES}


if __name__ == "__main__":
    _setting = json.loads(sys.argv[2])
    if "real" in _setting:
        pin([usable_cores()[int(os.environ["LOCAL_RANK"])]])
    if _setting["name"] == CONTENDED:  # before there are other threads
        pin([usable_cores()[int(int(os.environ["LOCAL_RANK"]) == SHARED)]])
    as_rank(Path(sys.argv[1]), lambda rank: measure(rank, _setting))
