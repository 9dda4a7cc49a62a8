"""One rank: trains a case by each engine and by `AutoStrategy`, from `fit` on; started by torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.auto.cases import CASES, LAYERS, PER_RANK, WIDTH, Case
from benchmarks.emulated import Emulated
from benchmarks.kit.figures import SETTLED
from benchmarks.kit.training import Clock, fit, forgetting, gathered, gloo
from benchmarks.planner.cases import Net, loader
from benchmarks.torchrun import as_rank
from lightning_hetero import AutoStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.auto import warm_up
from lightning_hetero.emulate.links import slow, sums_s
from lightning_hetero.types import Cluster

LEAST_BYTES = 1e5  # of a sum that is slowed down: smaller ones are an engine's own
MADE = {
    "balanced": LoadBalancedStrategy,
    "stale": BoundedStalenessStrategy,
    "pipeline": HeteroPipelineStrategy,
    "auto": AutoStrategy,
}


class SlowSums(Callback):
    """Lets DDP's sums of gradients take the time they would over described links, beside the backward pass."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.link = cluster, ThreadPoolExecutor(1)  # one sum after the other

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model, ranks, rank = trainer.strategy.model, tuple(range(trainer.world_size)), trainer.global_rank
        if not isinstance(model, DistributedDataParallel):
            return
        group: Any = model.process_group

        def summed(state, bucket):  # torch looks at annotations, and does not know texts
            seconds = sums_s(self.cluster, {ranks: float(bucket.buffer().nbytes)}, rank)
            own, arrived = allreduce_hook(group, bucket), torch.futures.Future()
            self.link.submit(lambda: arrived.set_result(slow(own.wait, lambda: seconds)()))
            return arrived

        model.register_comm_hook(None, summed)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.link.shutdown()


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
    clock, emulated = Clock(), Emulated(replace(case.scenario, seed=repeat))  # other draws in each repeat
    more: dict[str, Any] = {"engines": [f"hetero_{name}" for name in case.engines]} if engine == "auto" else {}
    callbacks: list[Callback] = [clock, emulated]
    if case.cluster is not None:
        callbacks.append(SlowSums(case.cluster))
        of_pipeline = {"cluster": case.cluster, "emulate_links": True}
        more |= {"pipeline": of_pipeline, "auto": {"options": {"hetero_pipeline": of_pipeline}}}.get(engine, {})
    strategy: Any = gloo(MADE[engine], **more)
    module, data = Net(WIDTH, LAYERS), loader(case.ranks, PER_RANK, steps, WIDTH)
    with forgetting(), links_as_described(case.cluster):
        dist.barrier()
        began_s = time.perf_counter()
        fit(strategy, module, data, steps=steps, callbacks=callbacks)
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
