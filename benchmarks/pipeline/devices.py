"""Emulated devices on emulated links, for engines that know of such links and for others (layer L)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from benchmarks.emulated import Emulated
from lightning_hetero import HeteroPipelineStrategy, Scenario


class LinkedDevices(Emulated):
    """Emulated devices on emulated links.

    The pipeline engine sleeps for both by itself. For engines that know of no emulated links this takes what they wait
    for on these: the part of a synchronisation that nothing hides, behind the real one.

    Args:
        scenario: of the devices.
        exchange_s: seconds by the devices' speeds; empty, or of a pipeline: the strategy emulates its links.
        options: as of `ThrottleCallback`.
    """

    def __init__(
        self, scenario: Scenario, exchange_s: Mapping[tuple[float, ...], float] | None = None, **options: Any
    ) -> None:
        super().__init__(scenario, **options)
        self._exchange_s = exchange_s or {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._exchange_s and not isinstance(trainer.strategy, HeteroPipelineStrategy):
            step = trainer.fit_loop.epoch_loop.total_batch_idx
            time.sleep(self._exchange_s[tuple(self.scenario.speed(rank, step) for rank in range(trainer.world_size))])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, HeteroPipelineStrategy):
            run: Any = trainer.strategy._run
            self.pacer = getattr(run.place.busy, "pacer", None)
