"""One rank: trains a case by each engine and by `AutoStrategy`, from `fit` on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.auto.cases import CASES, LAYERS, PER_RANK, WIDTH, Case
from benchmarks.kit.figures import SETTLED
from benchmarks.kit.training import Clock, fit, forgetting, gathered, gloo
from benchmarks.pipeline.devices import LinkedDevices
from benchmarks.planner.cases import Net, loader
from benchmarks.ranks import as_rank
from lightning_hetero import AutoStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.auto import warm_up
from lightning_hetero.emulate.links import slow, sums_s
from lightning_hetero.types import Cluster

LEAST_BYTES = 1e5  # of a sum that is slowed down: smaller ones are an engine's own
MADE = {
    "balanced": LoadBalancedStrategy, "stale": BoundedStalenessStrategy, "pipeline": HeteroPipelineStrategy,
    "auto": AutoStrategy,
}  # fmt: skip


@contextmanager
def links_as_described(cluster: Cluster | None) -> Iterator[None]:
    """Inside, who measures links and sums before training finds them as they are described."""
    if cluster is None:
        yield
        return
    ranks, rank = tuple(range(dist.get_world_size())), dist.get_rank()

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seconds = sums_s(cluster, {ranks: float(tensor.nbytes)}, rank)
        return slow(real, lambda: seconds if tensor.nbytes > LEAST_BYTES else 0.0)(tensor, *args, **kwargs)

    real = dist.all_reduce
    probed = mock.patch.object(warm_up, "probed", lambda *_, **__: cluster)
    with mock.patch.object(dist, "all_reduce", all_reduce), probed:
        yield


def train(engine: str, case: Case, steps: int, repeat: int) -> dict[str, Any]:
    """Trains once; returns the time from `fit` on, of a step, and what was chosen and predicted. Collective."""
    exchange_s, module = dict[tuple[float, ...], float](), Net(WIDTH, LAYERS)
    more: dict[str, Any] = {"engines": [f"hetero_{name}" for name in case.engines]} if engine == "auto" else {}
    if case.cluster is not None:
        of_all = {tuple(range(case.ranks)): float(sum(p.nbytes for p in module.parameters()))}
        exchange_s[tuple(case.scenario.speeds)] = sums_s(case.cluster, of_all, dist.get_rank())
        of_pipeline = {"cluster": case.cluster, "emulate_links": True}
        more |= {"pipeline": of_pipeline, "auto": {"options": {"hetero_pipeline": of_pipeline}}}.get(engine, {})
    strategy: Any = gloo(MADE[engine], **more)
    clock, emulated = Clock(), LinkedDevices(replace(case.scenario, seed=repeat), exchange_s)  # other draws each time
    data = loader(case.ranks, PER_RANK, steps, WIDTH)
    with forgetting(), links_as_described(case.cluster):
        dist.barrier()
        began_s = time.perf_counter()
        fit(strategy, module, data, steps=steps, callbacks=[clock, emulated])
        dist.barrier()
        whole_s = time.perf_counter() - began_s
    found = {
        "whole_s": whole_s,
        "set_up_s": clock.began_s - began_s,
        "step_s": (clock.ends_s[-1] - clock.ends_s[SETTLED - 1]) / (steps - SETTLED),
        "taken": max(gathered(emulated.taken())),
    }
    if engine == "auto":
        choice = strategy.choice
        found |= {"took": choice.engine, "line": choice.line, "predicted_s": choice.plan.chosen.step_s}
    return found


def measure(rank: int, setting: dict[str, Any]) -> dict[str, Any]:
    """Returns the runs by engine; engines in turns, after one short training that does not count."""
    case = next(case for case in CASES if case.name == setting["case"])
    runs: dict[str, Any] = {engine: [] for engine in (*case.engines, "auto")}
    train("balanced", case, SETTLED + 2, 0)
    for repeat in range(setting["repeats"]):
        for engine, one in runs.items():
            one.append(train(engine, case, setting["steps"], repeat))
    return runs


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]), lambda rank: measure(rank, json.loads(sys.argv[2])))
