"""Collectives of the user's own in a step that only the first rank of each group runs: an error, and no wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from tests.ranks.strangers.kit import ends, refusal, trainer, two_stages

PLANS: dict[str, dict[str, Any]] = {
    "plan": {"backbone": "net", "plan": two_stages(0, 2, 3, micro_samples=8)},
    "lone": {"backbone": "net", "plan": {"groups": [
        {"ranks": [r], "cuts": [0, 3], "samples": 8, "micro_samples": 8} for r in range(2)
    ]}},
    "measured": {"backbone": "net"},
}  # fmt: skip
X = torch.arange(32.0).unsqueeze(1) ** 2


class Asks(LightningModule):
    """Does something together with the other ranks, in one of its hooks."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.mean = MeanMetric(dist_sync_on_step=True)
        self.where, self.what, self.all = where, what, 0.0

    def ask(self, where: str, value: Tensor) -> None:
        if where != self.where:
            return
        strategy = self.trainer.strategy
        if self.what == "all_gather":
            self.all = float(self.all_gather(value).mean())
        elif self.what == "all_reduce":
            dist.all_reduce(value)
            self.all = float(value) / 2
        elif self.what == "objects":
            dist.all_gather_object([None, None], 1)
        elif self.what == "barrier":
            strategy.barrier()
        else:
            strategy.broadcast(1) if self.what == "broadcast" else strategy.reduce(value)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean(batch[0])
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("plain", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)
        self.ask("training_step", batch[0].mean())
        return self.net(batch[0] * 0.01).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.ask("validation_step", batch[0].mean())

    def on_train_batch_end(self, *_: Any) -> None:
        self.ask("on_train_batch_end", torch.tensor(float(self.global_rank)))

    def on_train_epoch_end(self) -> None:
        self.ask("on_train_epoch_end", torch.tensor(float(self.global_rank)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def asking(rank: int, world: int, engine: str, plan: str, where: str, what: str) -> dict[str, float]:
    """PL#6200: the ranks' losses are gathered in the step; PL#5865: a metric that is synchronised on each step."""
    module, loader = Asks(where, what), DataLoader(TensorDataset(X), batch_size=8)
    trained = trainer(rank, world, engine, {engine: PLANS[plan]})
    trained.fit(module, loader, DataLoader(TensorDataset(X[:16]), batch_size=8))
    return {**{name: float(v) for name, v in trained.callback_metrics.items()}, "all": module.all}


@pytest.mark.stock_ddp("all_gather_step", "pipeline", refused="one rank of each group runs the step")
@pytest.mark.parametrize(
    ("plan", "where", "what"),
    [
        ("plan", "training_step", "all_gather"),
        ("measured", "training_step", "all_gather"),
        ("lone", "training_step", "all_reduce"),
        pytest.param("measured", "training_step", "all_reduce", marks=pytest.mark.long),
        ("plan", "training_step", "objects"),
        ("plan", "training_step", "barrier"),
        ("plan", "training_step", "broadcast"),
        ("plan", "training_step", "reduce"),
        ("plan", "validation_step", "all_gather"),
        pytest.param("lone", "validation_step", "all_reduce", marks=pytest.mark.long),
    ],
)
def test_a_step_that_waits_for_other_ranks_is_refused_at_once(plan: str, where: str, what: str) -> None:
    error = refusal(asking, "pipeline", plan, where, what, timeout_s=20.0)
    assert f") in {where}, " in error and "communicates with other ranks" in error
    assert "strategy='hetero_balanced'" in error and "on_train_batch_end" in error


@pytest.mark.stock_ddp("torchmetrics", "all_gather_hook", "pipeline")
@pytest.mark.parametrize(("plan", "where"), [("plan", "on_train_batch_end"), ("measured", "on_train_epoch_end")])
def test_metrics_and_hooks_that_all_ranks_run(plan: str, where: str) -> None:
    want = float(X.mean())
    for what in ("all_gather", "all_reduce"):
        for found in ends(asking, "pipeline", plan, where, what):
            assert found["mean_epoch"] == pytest.approx(want) and found["plain"] == pytest.approx(want)
            assert found["all"] == 0.5
