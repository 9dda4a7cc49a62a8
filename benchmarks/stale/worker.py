"""One rank of the real-process half: trains the runs of a case one after the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.emulated import Emulated
from benchmarks.kit.figures import percentile
from benchmarks.kit.training import Clock, fit, gloo
from benchmarks.ranks import quietly
from benchmarks.stale.real import CLUSTERS, PER_RANK, SPELL_STEP_S, TASKS, WORLD
from lightning_hetero import BoundedStalenessStrategy, LoadBalancedStrategy
from lightning_hetero.demo import CharTransformer, DigitsCNN, DigitsData, TopicsText

WARM_UP = 3  # batches that are no steps yet


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


def task(name: str, steps: int) -> tuple[LightningModule, LightningDataModule]:
    """Returns model and data; the batch of each device is that of stock DDP."""
    model: Digits | Text
    data: LightningDataModule
    if name.startswith("digits"):
        model, data = Digits(), DigitsData(batch_size=PER_RANK)
    else:
        model, data = Text(), TopicsText(batch_size=PER_RANK, max_train_windows=PER_RANK * WORLD * 30)
    model.steps = steps
    return model, data


def strategy(name: str) -> Any:
    if name in ("ddp", "balanced"):
        return gloo(DDPStrategy) if name == "ddp" else gloo(LoadBalancedStrategy, min_samples=1)
    return gloo(BoundedStalenessStrategy, policy=name)


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


def train(setting: dict[str, Any], name: str, seed: int) -> dict[str, Any]:
    """Trains one run and returns what this rank saw.

    Raises:
        RuntimeError: it ended early.
    """
    cluster = next(c for c in CLUSTERS if c.name == setting["cluster"])
    sample_s = next(t.sample_s for t in TASKS if t.name == setting["task"])
    steps = setting["steps"]
    scenario = cluster.scenario(sample_s, seed, steps)
    seed_everything(seed, verbose=False)
    model, data = task(setting["task"], steps)
    emulated = Emulated(scenario, step_every_s=SPELL_STEP_S if cluster.spells else None)
    clock, counted = Clock(), Counted()
    trainer = fit(strategy(name), model, data, steps=steps, ranks=WORLD, callbacks=[clock, emulated, counted])
    if trainer.global_step != steps:
        raise RuntimeError(f"{name} on {cluster.name} ended after {trainer.global_step} of {steps} steps")
    of_server = counted.metrics
    staleness = {int(k): v for k, v in of_server.get("staleness", {}).items()}
    held_s, apply_s = sum(of_server.get("hold_s", {}).values()) / WORLD, of_server.get("apply_s", 0.0)
    work_s = emulated.pacer.taken_s if emulated.pacer is not None else 0.0
    steps_s = clock.steps_s()[WARM_UP:-1]
    return {
        "engine": name,
        "seed": seed,
        "steps": steps,
        "fit_s": clock.fit_s,
        "p95_s": percentile(steps_s, 95),
        "longest_s": max(steps_s),
        "taken": emulated.taken(),
        "parts_s": {"work": work_s, "held": held_s, "applied": apply_s, "rest": clock.fit_s - work_s - held_s},
        "loss": loss_of(model, data) if trainer.is_global_zero else 0.0,
        "stale_fraction": of_server.get("stale_fraction", 0.0),
        "max_staleness": max(staleness, default=0),
        "recomputed": sum(of_server.get("discarded", {}).values()),
        "hold_s": held_s,
    }


class Counted(Callback):
    """Keeps what the server had counted at the last meeting."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        known = getattr(trainer.strategy, "server_metrics", None)
        self.metrics = known() if callable(known) else {}


if __name__ == "__main__":
    quietly()
    _setting, _path = json.loads(sys.argv[1]), Path(sys.argv[2])
    _found = [train(_setting, run["engine"], run["seed"]) for run in _setting["runs"]]
    _path.write_text(json.dumps(_found))
