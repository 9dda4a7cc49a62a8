"""What the pins of Lightning's private names share: questions asked inside of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from tests.ranks.kit import Toy, quiet_trainer, regression

VERSIONS = (
    f"lightning {lightning.__version__}, torch {torch.__version__}, torchmetrics {torchmetrics.__version__}"
    " behave differently: adapt lightning_hetero/lightning_compat"
)
BATCH, STEPS = 10, 4
SAMPLES = BATCH * STEPS


class Validated(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Ask(Callback):
    """Calls a function at every hook it names and keeps the answers."""

    def __init__(self, ask: Callable[[Any], Any], *hooks: str) -> None:
        self.answers: dict[str, list[Any]] = {hook: [] for hook in hooks}
        for hook in hooks:
            setattr(self, hook, lambda trainer, *_, hook=hook, **__: self.answers[hook].append(ask(trainer)))


def fit(*callbacks: Callback, module: Toy | None = None, **kwargs: Any) -> Any:
    trainer = quiet_trainer(devices=1, callbacks=list(callbacks), **{"max_epochs": 2, **kwargs})
    loader = DataLoader(regression(SAMPLES), batch_size=BATCH)
    trainer.fit(module or Validated(), loader, DataLoader(regression(SAMPLES), batch_size=BATCH))
    return trainer


def train(module: Toy, *callbacks: Callback, loader: Any = None, **kwargs: Any) -> Any:
    trainer = quiet_trainer(devices=1, callbacks=list(callbacks), **{"max_epochs": 1, **kwargs})
    trainer.fit(module, loader or DataLoader(regression(SAMPLES), batch_size=BATCH))
    return trainer


class Each(Callback):
    """Calls a function at the start, or the end, of each batch and keeps the answers."""

    def __init__(self, ask: Any, *, end: bool = False) -> None:
        self.answers: list[Any] = []
        name = "on_train_batch_end" if end else "on_train_batch_start"
        setattr(self, name, lambda trainer, *_: self.answers.append(ask(trainer)))
