"""One rank of the real-process half: trains the runs it is given, one after the other; rank 0 appends to the cache."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.emulated import Emulated
from benchmarks.stale.policies import WRITTEN
from benchmarks.stale.real import CLUSTERS, PER_RANK, SPELL_STEP_S, TASKS, WORLD, Run, key
from benchmarks.steps import percentile
from lightning_hetero import BoundedStalenessStrategy, LoadBalancedStrategy
from lightning_hetero.demo import CharTransformer, DigitsCNN, DigitsData, TopicsText

WARM_UP = 3  # batches that are no steps yet


class Clock(Callback):
    """Seconds from the first batch to the end of training, and of each of Lightning's batches, on this rank."""

    def __init__(self) -> None:
        self.fit_s = 0.0
        self._began_s = 0.0
        self._starts_s: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._starts_s.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self._starts_s)][WARM_UP:]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._began_s:
            self._began_s = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fit_s = time.perf_counter() - self._began_s


class Decaying(LightningModule):
    """Lets the learning rate fall to 0 over the run, so that final losses do not depend on the last few batches."""

    steps = 1

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digits(Decaying, DigitsCNN):
    pass


class Text(Decaying, CharTransformer):
    pass


def task(run: Run) -> tuple[LightningModule, LightningDataModule]:
    """Returns model and data; the batch of each device is that of stock DDP."""
    model: Digits | Text
    data: LightningDataModule
    if run.task.startswith("digits"):
        model, data = Digits(), DigitsData(batch_size=PER_RANK)
    else:
        model, data = Text(), TopicsText(batch_size=PER_RANK, max_train_windows=PER_RANK * WORLD * 30)
    model.steps = run.steps
    return model, data


def strategy(engine: str) -> Any:
    if engine == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if engine == "balanced":
        return LoadBalancedStrategy(process_group_backend="gloo", monitor=False, min_samples=1)
    policy = WRITTEN[engine]() if engine in WRITTEN else engine
    return BoundedStalenessStrategy(policy=policy, process_group_backend="gloo", monitor=False)


def loss_of(model: LightningModule, data: LightningDataModule) -> float:
    """Mean loss over the training set, in one pass without dropout."""
    model.eval()
    total, samples = 0.0, 0
    with torch.no_grad():
        for inputs, targets in data.train_dataloader():
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
            total, samples = total + float(loss) * len(inputs), samples + len(inputs)
    return total / samples


def train(run: Run) -> dict[str, Any]:
    """Trains one run and returns what this rank saw."""
    cluster = next(c for c in CLUSTERS if c.name == run.cluster)
    sample_s = next(t.sample_s for t in TASKS if t.name == run.task)
    scenario = cluster.scenario(sample_s, run.seed, run.steps)
    seed_everything(run.seed, verbose=False)
    model, data = task(run)
    clock, engine = Clock(), strategy(run.engine)
    emulated = Emulated(scenario, step_every_s=SPELL_STEP_S if cluster.spells else None)
    metrics: dict[str, Any] = {}
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=engine,
        max_steps=run.steps,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            clock,
            emulated,
            Keep(metrics),
        ],
    )
    gc.collect()  # of the imports' and the last run's, or it comes in some step of some engine
    trainer.fit(model, datamodule=data)
    staleness = {int(k): v for k, v in metrics.get("staleness", {}).items()}
    return {
        "fit_s": clock.fit_s,
        "p95_s": percentile(clock.steps_s(), 95),
        "longest_s": max(clock.steps_s()),
        "taken": emulated.taken(),
        "compute_s": emulated.pacer.taken_s if emulated.pacer is not None else 0.0,
        "loss": loss_of(model, data) if trainer.is_global_zero else 0.0,
        "steps": trainer.global_step,
        "stale_fraction": metrics.get("stale_fraction", 0.0),
        "mean_staleness": sum(k * v for k, v in staleness.items()) / max(1, sum(staleness.values())),
        "max_staleness": max(staleness, default=0),
        "recomputed": sum(metrics.get("discarded", {}).values()),
        "hold_s": sum(metrics.get("hold_s", {}).values()) / WORLD,
        "apply_s": metrics.get("apply_s", 0.0),
    }


class Keep(Callback):
    """Keeps what the server had counted at the last meeting."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        known = getattr(trainer.strategy, "server_metrics", None)
        self.metrics.update(known() if callable(known) else {})


def main() -> None:
    runs, cache = [Run(**r) for r in json.loads(sys.argv[1])], Path(sys.argv[2])
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for run in runs:
        result = train(run)
        if result["steps"] != run.steps:
            raise RuntimeError(f"{run} ended after {result['steps']} steps")
        if torch.distributed.get_rank() == 0:
            with cache.open("a") as file:
                file.write(json.dumps({"key": key(run), "result": result}) + "\n")


if __name__ == "__main__":
    main()
