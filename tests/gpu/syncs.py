"""Counts by place where the host waits for the GPU, as `torch.cuda.set_sync_debug_mode` tells."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

_PACKAGES = ("/lightning_hetero/", "/lightning/", "/torch/nn/parallel/", "/torch/optim/", "/torch/amp/")


def _place() -> str:
    """Returns the innermost frame of this project, else of Lightning or torch's parts that train."""
    frames = list(reversed(traceback.extract_stack()[:-3]))
    for package in _PACKAGES:
        for frame in frames:
            if package in frame.filename:
                return f"{package[1:]}{frame.filename.rsplit(package, 1)[1]}:{frame.lineno} {frame.name}"
    return "elsewhere"


class CountSyncs(Callback):
    """Counts from the fourth step on; torch does not tell waiting for events and streams.

    Attributes:
        steps: that were counted.
        places: how often at which place.
    """

    SKIPPED = 3

    def __init__(self) -> None:
        self.steps = -self.SKIPPED
        self.places: Counter[str] = Counter()
        self._context: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        if self.steps == 1:
            self._context = warnings.catch_warnings()
            self._context.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            torch.cuda.set_sync_debug_mode("warn")

    def _note(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.places[_place()] += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._context is not None:
            torch.cuda.set_sync_debug_mode("default")
            self._context.__exit__(None, None, None)
            self._context = None

    def per_step(self) -> float:
        return self.places.total() / max(1, self.steps)
