"""Measuring runs the user's training step before training: of what it leaves behind nothing stays."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection

from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer, regression
from tests.ranks.pipeline.kit import WIDTH, Deep, pipeline

ONE_GROUP = {"devices": [{"count": 2}], "link": {"bandwidth": "10 GB/s"}}


class Counts(Callback):
    """Asked by the step, and counts that."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> int:
        self.asked += 1
        return self.asked


class Writes(CSVLogger):
    """Notes what is written to it."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.written: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.written.append(metrics)


class Untidy(Deep):
    """Leaves things behind in ways that are usual; `Snapshot` has tests of all kinds of objects."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()
        self.teacher = deepcopy(self.before).requires_grad_(False)
        self.metrics = MetricCollection({"error": MeanSquaredError()})
        self.training_step_outputs: list[Tensor] = []
        self.kinds: Counter[str] = Counter()
        self.rng = np.random.default_rng(3)
        self.notes: dict[str, Any] = {}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.kinds["batches"] += 1
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.head(self.model(self.norm(self.before(x + 0.0 * self.rng.normal() * torch.rand(1)))))
        loss = nn.functional.mse_loss(out, y)
        with torch.no_grad():
            for mean, p in zip(self.teacher.parameters(), self.before.parameters(), strict=True):
                mean.mul_(0.5).add_(p, alpha=0.5)
            self.head.weight.data.mul_(1.01)
            self.model[0].linear.bias.data.clamp_(-0.01, 0.01)  # type: ignore[index]
        self.training_step_outputs.append(loss.detach())
        self.last = loss.detach()
        self.metrics(out, y)
        self.log_dict(self.metrics)
        self.logger.log_metrics({"direct": loss.item()})  # type: ignore[union-attr]
        for callback in self.trainer.callbacks:  # pyright: ignore
            if isinstance(callback, Counts):
                callback.ask()
        return loss

    def setup(self, stage: str) -> None:
        self.notes["before"] = self.note()

    def on_fit_start(self) -> None:
        self.notes["after"] = self.note()

    def note(self) -> dict[str, Any]:
        held = {n: t for n, t in (*self.named_parameters(), *self.named_buffers()) if not t.is_meta}
        assert not any(p.grad is not None for p in self.parameters())
        return deepcopy({
            "tensors": {name: tensor.tolist() for name, tensor in held.items()},
            "attributes": sorted(set(vars(self)) - {"_trainer"}),
            "lists": (self.training_step_outputs, self.kinds),
            "streams": (str(self.rng.bit_generator.state), torch.get_rng_state().tolist(), random.getstate()),
            "metrics": {n: (m.update_count, str(m.metric_state), m._computed) for n, m in self.metrics.items()},
            "logged": dict(self.trainer.callback_metrics),
            "asked": [c.asked for c in self.trainer.callbacks if isinstance(c, Counts)],  # pyright: ignore
            "written": [logger.written for logger in self.trainer.loggers if isinstance(logger, Writes)],
        })  # fmt: skip


def fitted(rank: int, world: int) -> dict[str, Any]:
    module, plan = Untidy(), pipeline(None, cluster=ONE_GROUP, max_groups=1, micro_batch_size=16)
    trainer = rank_trainer(rank, world, plan, max_steps=1, callbacks=[Counts()], logger=[Writes(".")])
    trainer.fit(module, DataLoader(regression(32), batch_size=8))
    assert plan.planned is not None and plan.planned.model is not None  # it was measured
    return module.notes


@pytest.mark.stock_ddp("kept_by_steps", "pipeline")
def test_what_a_step_leaves_on_the_module_is_put_back() -> None:
    for rank, notes in enumerate(run_ranks(2, fitted, timeout_s=120.0)):
        before, after = notes["before"], notes["after"]
        held = after["tensors"]
        if rank == 0:  # the other has got rank 0's since
            assert held and held == {name: before["tensors"][name] for name in held}
        for what in set(before) - {"tensors"}:
            assert after[what] == before[what], (rank, what)
        assert after["lists"][0] == []
