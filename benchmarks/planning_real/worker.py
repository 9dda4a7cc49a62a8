"""One rank: trains every case by every engine, and notes what each predicted and what it took; started by `rank`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.planning_real.models import CASES, Case
from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from lightning_hetero.types import StepReport


def strategy(engine: str) -> Any:
    """Returns an engine as a user has it: nothing emulated, no costs and no devices told."""
    if engine == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if engine == "balanced":
        return LoadBalancedStrategy(process_group_backend="gloo", monitor=False)
    if engine == "stale":
        return BoundedStalenessStrategy(process_group_backend="gloo", monitor=False)
    most = 1 if engine == "pipeline, one chain" else None
    return HeteroPipelineStrategy(backbone="layers", max_groups=most, process_group_backend="gloo")


class Notes(Callback):
    """Notes when each batch ends, also one that went by without this rank, and each new report of the engine."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.used_s: list[float] = []
        self.reports: dict[tuple[int, int], StepReport] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends_s.append(time.perf_counter())
        self.used_s.append(time.process_time())
        ask = getattr(trainer.strategy, "step_report", None)
        report = ask() if callable(ask) else None
        if isinstance(report, StepReport):
            self.reports.setdefault((report.epoch, report.step), report)


def _between(stamps: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(stamps)]


def train(engine: str, case: Case, steps: int) -> dict[str, Any]:
    """Trains for some steps; returns what was predicted and what each step took on this rank."""
    notes, chosen, world = Notes(), strategy(engine), int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=chosen,
        max_steps=steps + 1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[notes],
    )
    data = case.dataset(case.per_rank * world * (steps + 1))
    trainer.fit(case.make(), DataLoader(data, batch_size=case.per_rank))
    found: dict[str, Any] = {"steps_s": _between(notes.ends_s), "used_s": _between(notes.used_s), "reports": []}
    for report in notes.reports.values():
        found["reports"].append({
            "step": report.step,
            "samples": [record.samples for record in report.records],
            "compute_s": [record.compute_s for record in report.records],
            "predicted_s": [None if s != s else s for s in report.predicted_s],
        })  # fmt: skip
    planned = getattr(chosen, "planned", None)
    if planned is not None:
        groups = [{"ranks": g.ranks, "cuts": g.cuts, "micro_batches": g.micro_batches} for g in planned.plan.groups]
        found["plan"] = {
            "total_s": planned.plan.total_s,
            "sync_s": planned.plan.sync_s,
            "groups": groups,
            "speeds": [device.speed for device in planned.cluster.devices],
            "seconds": planned.seconds,
        }
    return found


def main() -> None:
    path, setting = Path(sys.argv[1]), json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_hetero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    every: dict[str, dict[str, Any]] = {}
    for case in (case for case in CASES if case.name in setting["cases"]):
        every[case.name] = {}
        for engine in setting["engines"]:
            mine = train(engine, case, setting["steps"])
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            # A step is over when it is on all ranks.
            steps_s = [max(times) for times in zip(*(rank["steps_s"] for rank in ranks), strict=True)]
            every[case.name][engine] = {**ranks[0], "steps_s": steps_s, "used_s": [rank["used_s"] for rank in ranks]}
            if dist.get_rank() == 0:
                path.write_text(json.dumps(every))
    dist.barrier()
    dist.destroy_process_group()
