"""Step times beside stock DDP's, and what unequal ranks are told and given."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_hetero import Scenario, ThrottleCallback
from tests.gpu.check.found import detail, found, is_dry
from tests.gpu.check.models import Gpt, Synthetic, Trained, images, resnet50, texts
from tests.gpu.kit import card_trainer, engine
from tests.gpu.ranks import run_card_ranks

SMALL = "GPT of 7 M"  # gradients go through the host where ranks share a card
NAMES = ("ddp", "balanced", "stale", "federated")


class Times(Callback):
    """Seconds between the ends of steps, by events."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.samples: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)
        self.samples.append(len(batch[0]))

    def median_s(self) -> float:
        """Returns the time of a step by events; the first half is left out."""
        torch.cuda.synchronize()
        pairs = list(zip(self.events, self.events[1:], strict=False))
        return statistics.median([a.elapsed_time(b) / 1e3 for a, b in pairs[len(pairs) // 2 :]])


def _model(name: str) -> tuple[Trained, Synthetic]:
    if is_dry():
        return Trained(Gpt(16, 1, 50, 8)), Synthetic(texts(8, 50), 10_000)
    if name == "ResNet-50":
        return Trained(resnet50()), Synthetic(images(224), 10_000)
    if name == "GPT-2 small":
        return Trained(Gpt()), Synthetic(texts(256, 50257), 10_000)
    return Trained(Gpt(256, 4, 8192)), Synthetic(texts(256, 8192), 10_000)


def _fit(
    rank: int, world: int, name: str, model: str, steps: int, speeds: list[float] | None, precision: str, samples: int
) -> dict[str, Any]:
    module, data = _model(model)
    times = Times()
    strategy = engine(name, "nccl" if world == 1 else "gloo") if name != "balanced" else _balanced(world)
    callbacks: list[Any] = [times]
    if speeds is not None:
        callbacks.append(ThrottleCallback(Scenario(speeds=speeds)))
    trainer = card_trainer(rank, world, strategy, precision=precision, callbacks=callbacks, max_steps=steps)
    trainer.fit(module, DataLoader(data, batch_size=samples))
    report = getattr(trainer.strategy, "step_report", lambda: None)()
    told = [record.compute_s for record in report.records] if report is not None else []
    shares = list(getattr(trainer.strategy, "shares", None) or ())
    return {"step_s": times.median_s(), "shares": shares, "told_s": told, "samples": times.samples}


def _balanced(world: int) -> Any:
    from lightning_hetero import LoadBalancedStrategy

    return LoadBalancedStrategy(monitor=False, process_group_backend="nccl" if world == 1 else "gloo")


def step_times() -> None:
    """One rank, and four that take turns on the card: those times say what is added, not how fast an engine is."""
    steps = 6 if is_dry() else 30
    for world in (1, 2 if is_dry() else 4):
        for model in (SMALL,) if is_dry() or world > 1 else ("ResNet-50", "GPT-2 small"):
            stock = 0.0
            for name in NAMES[:2] if is_dry() else NAMES:
                precision, samples = ("32-true", 8) if is_dry() else ("bf16-mixed", 8 if world > 1 else 32)
                rows = run_card_ranks(world, _fit, name, model, steps, None, precision, samples)
                step_s = max(row["step_s"] for row in rows)
                stock = stock or step_s
                detail(world=world, model=model, engine=name, rows=rows)
                found(**{f"{model} x{world} {name}": f"{1e3 * step_s:.1f} ms ({step_s / stock:.2f})"})


def unequal() -> None:
    """Four ranks, emulated at speeds of 1, 1, 1/2 and 1/4, with so much work that samples, not launches, take time."""
    speeds, samples = ([1.0, 0.5], 8) if is_dry() else ([1.0, 1.0, 0.5, 0.25], 64)
    rows = run_card_ranks(len(speeds), _fit, "balanced", SMALL, 8 if is_dry() else 60, speeds, "32-true", samples)
    detail(rows=rows)
    found(shares=rows[0]["shares"], **{"own times told [ms]": [round(1e3 * s, 1) for s in rows[0]["told_s"]]})
    found(step=f"{1e3 * rows[0]['step_s']:.1f} ms")
