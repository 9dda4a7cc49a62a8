"""Measuring runs the user's training step before training: of what it leaves behind nothing stays."""

from __future__ import annotations

import random
from collections import Counter, deque
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError, MetricCollection

from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer, regression
from tests.ranks.pipeline.kit import LAYERS, WIDTH, Block, Deep, pipeline

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


class Drawing(Dataset):
    """Augments with a generator of its own."""

    def __init__(self) -> None:
        self.samples, self.rng, self.read = regression(32), np.random.default_rng(5), 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        self.read += 1
        x, y = self.samples[i]
        return x + 0.0 * self.rng.normal(), y


class Untidy(Deep):
    """Leaves things behind in all the ways that are usual."""

    history: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()
        self.teacher = deepcopy(self.before).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.float64))
        self.metrics = MetricCollection({"error": MeanSquaredError()})
        self.training_step_outputs: list[Tensor] = []
        self.stages: dict[str, list[int]] = {"sizes": []}
        self.kinds: Counter[str] = Counter()
        self.queue = torch.zeros(4, dtype=torch.float64)
        self.recent: deque[float] = deque(maxlen=2)
        self.rng, self.dice = np.random.default_rng(3), random.Random(3)
        self.torch_rng = torch.Generator().manual_seed(3)
        self.steps = 0
        self.same_list = self.training_step_outputs  # somebody else's reference
        self.notes: dict[str, Any] = {}

    def backbone(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(Block(dropout=0.1), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS)))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.kinds["batches"] += 1
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.0 * (self.rng.normal() + self.dice.random() + torch.rand(1, generator=self.torch_rng).item())
        h = self.norm(self.before(x))
        out = self.head(self.model(h))
        loss = nn.functional.mse_loss(out, y)
        with torch.no_grad():
            for mean, p in zip(self.teacher.parameters(), self.before.parameters(), strict=True):
                mean.mul_(0.5).add_(p, alpha=0.5)
            self.centre.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.head.weight.data.mul_(1.01)
            self.model[0][0].linear.bias.data.clamp_(-0.01, 0.01)
            self.queue[self.steps % 4] = loss
        self.training_step_outputs.append(loss.detach())
        self.stages["sizes"].append(len(x))
        self.kinds["steps"] += 1
        self.recent.append(loss.item())
        self.history.append(loss.item())
        self.steps += 1
        self.last = loss.detach()
        self.metrics(out, y)
        self.log_dict(self.metrics)
        self.log("loss", loss)
        if self.logger is not None:
            self.logger.log_metrics({"direct": loss.item()})
        for callback in self.trainer.callbacks:  # pyright: ignore
            if isinstance(callback, Counts):
                callback.ask()
        return loss

    def setup(self, stage: str) -> None:
        self.notes["before"] = self.note()

    def on_fit_start(self) -> None:
        self.notes["after"] = self.note()

    def note(self) -> dict[str, Any]:
        tensors = {n: t.tolist() for n, t in (*self.named_parameters(), *self.named_buffers()) if not t.is_meta}
        return deepcopy(self._picture(tensors))

    def _picture(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {
            "tensors": tensors,
            "attributes": sorted(set(vars(self)) - {"_trainer"}),
            "lists": (self.training_step_outputs, self.stages, self.kinds, list(self.recent), self.history),
            "queue": (self.queue.tolist(), id(self.queue)),
            "same": self.same_list is self.training_step_outputs,
            "streams": (str(self.rng.bit_generator.state), self.dice.getstate(), self.torch_rng.get_state().tolist()),
            "global": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
            "metrics": {
                name: (m.update_count, str(m.metric_state), m._computed) for name, m in self.metrics.items()
            },
            "steps": self.steps,
            "logged": dict(self.trainer.callback_metrics),
            "asked": [c.asked for c in self.trainer.callbacks if isinstance(c, Counts)],  # pyright: ignore
            "written": [logger.written for logger in self.trainer.loggers if isinstance(logger, Writes)],
        }


def fitted(rank: int, world: int) -> dict[str, Any]:
    module, data = Untidy(), Drawing()
    data_before = str(data.rng.bit_generator.state), data.read

    class Look(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            module.notes["data"] = (str(data.rng.bit_generator.state), data.read) == data_before

    plan = pipeline(None, cluster=ONE_GROUP, max_groups=1, micro_batch_size=16)
    options: dict[str, Any] = {"callbacks": [Counts(), Look()], "logger": [Writes(".")]}
    trainer = rank_trainer(rank, world, plan, max_steps=1, **options)
    trainer.fit(module, DataLoader(data, batch_size=8))
    assert plan.planned is not None and plan.planned.model is not None  # it was measured
    return module.notes


@pytest.mark.stock_ddp("models: training_step keeps lists, averages and generators on the module", "pipeline")
def test_what_a_step_leaves_on_the_module_is_put_back() -> None:
    for rank, notes in enumerate(run_ranks(2, fitted, timeout_s=120.0)):
        before, after = notes["before"], notes["after"]
        held = after["tensors"]
        if rank == 0:  # the other has got rank 0's since
            assert held and held == {name: before["tensors"][name] for name in held}
        for what in set(before) - {"tensors"}:
            assert after[what] == before[what], (rank, what)
        assert after["same"] and after["lists"][0] == [] and notes["data"]
