"""One rank: trains one case by its engines, as planned, and notes what steps take; started by torchrun."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.emulated import Emulated
from benchmarks.planner.cases import CASES, WARM_UP, Case, Net, loader
from benchmarks.torchrun import as_rank
from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.solvers.plans import plan_from_plain


class Notes(Callback):
    """Notes when each batch ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends_s.append(time.perf_counter())


def strategy(engine: str, setting: dict[str, Any], cluster: dict[str, Any]) -> Any:
    """Returns an engine as the planner's overrides would make it."""
    gloo: dict[str, Any] = {"process_group_backend": "gloo"}
    if engine == "ddp":
        return DDPStrategy(**gloo)
    if engine == "balanced":
        return LoadBalancedStrategy(**gloo, monitor=False)
    if engine == "stale":
        return BoundedStalenessStrategy(**gloo, monitor=False)
    return HeteroPipelineStrategy(
        **gloo, backbone="model", monitor=False, controller=None, cluster=cluster,
        plan=plan_from_plain(setting["plan"]), profile=model_from_plain(setting["profile"]),
    )  # fmt: skip


def train(case: Case, engine: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Trains; returns the time of a step, and what emulated work took as part of what it was to take."""
    ranks, notes, emulated = dist.get_world_size(), Notes(), Emulated(case.scenario)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=strategy(engine, setting, {"devices": [{"speed": v} for v in case.scenario.speeds]}),
        callbacks=[notes, emulated],
    )  # fmt: skip
    trainer.fit(Net(), loader(ranks))
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (notes.ends_s, emulated.taken()))
    ends = [ends_s for ends_s, _ in everyone]
    if engine == "stale":  # ranks pass ticks in bursts: only the whole tells
        step_s = statistics.fmean((one[-1] - one[WARM_UP]) / (len(one) - 1 - WARM_UP) for one in ends)
    else:
        steps = [
            max(one[i] - before for one, before in zip(ends, [one[i - 1] for one in ends], strict=True))
            for i in range(WARM_UP, len(ends[0]))
        ]
        step_s = statistics.median(steps)
    return {"step_s": step_s, "taken": max(taken for _, taken in everyone)}


def main() -> None:
    setting = json.loads(sys.argv[2])
    case = next(case for case in CASES if case.name == setting["case"])
    as_rank(Path(sys.argv[1]), lambda rank: {engine: train(case, engine, setting) for engine in case.engines})


if __name__ == "__main__":
    main()
