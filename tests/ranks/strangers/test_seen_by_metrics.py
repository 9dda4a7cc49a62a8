"""What metrics, logged values and hooks see where a rank trains several parts of a batch, none, or one in vain."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from tests.ranks.kit import Toy
from tests.ranks.stale.fits import Late
from tests.ranks.strangers import kit

pytestmark = pytest.mark.ranks

SAMPLES, BATCH, EPOCHS = 48, 4, 2
X = torch.arange(float(SAMPLES), dtype=torch.float64) ** 2


class Measured(Toy):
    """Logs and measures what it trains on.

    Metrics of an epoch (PL#17831, #5267), a metric with `dist_sync_on_step` (PL#5865), sums and extremes, samples that
    hooks count (PL#2435), and what the step counts and keeps by itself (PR#16520).
    """

    computed = 0  # of the class, so that nobody takes back what was computed in vain

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.net = nn.Linear(1, 1).double()
        self.mean, self.synced, self.total = MeanMetric(), MeanMetric(dist_sync_on_step=True), SumMetric()
        type(self).computed = 0
        self.trained = self.ended = self.wrong = 0
        self.kept: list[float] = []
        self.times: dict[float, int] = {}
        self.by_epoch: dict[int, list[float]] = {}
        self.row: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x,) = batch
        type(self).computed += len(x)
        self.trained += len(x)
        self.kept += x.tolist()
        self.by_epoch.setdefault(self.current_epoch, []).extend(x.tolist())
        for value in x.tolist():
            self.times[value] = self.times.get(value, 0) + 1
        self.mean(x)
        self.synced(x)
        self.total(x)
        over: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log_dict({"mean": self.mean, "synced": self.synced, "total": self.total}, **over)
        over["sync_dist"] = True
        self.log("sum", x.sum(), reduce_fx="sum", **over)
        self.log("samples", float(len(x)), reduce_fx="sum", **over)
        self.log("largest", x.max(), reduce_fx="max", **over)
        self.log("plain", x.mean(), **over)
        loss = 1e-9 * self.net(x[:, None]).mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": loss, "x": x}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended += len(batch[0])
        self.wrong += not torch.equal(outputs["x"], batch[0])
        self.log("hooked", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_end(self) -> None:
        self.row = {name: float(value) for name, value in self.trainer.callback_metrics.items()}


class Counts(Callback):
    """Counts samples as callbacks do."""

    ended = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended += len(outputs["x"])


def measured(rank: int, world: int, engine: str, automatic: bool) -> Any:
    module, counts = Measured(automatic), Counts()
    late = [Late(1, "middle", 3)] if engine == "stale" else []
    trainer = kit.trainer(
        rank, world, engine, {"balanced": {"min_samples": [6, 2], "max_samples": [6, 2]}}, max_epochs=EPOCHS,
        callbacks=[counts, *late],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(X), batch_size=BATCH))
    kept = module.kept, module.times, module.by_epoch
    return module.row, module.ended, counts.ended, module.wrong, module.trained, kept, module.computed


@pytest.mark.stock_ddp("log_epoch", "batch_argument", "outputs_argument", "torchmetrics", "balanced", "stale")
@pytest.mark.parametrize(("engine", "automatic"), [("balanced", True), ("stale", True), ("stale", False)])
def test_each_sample_is_seen_once(engine: str, automatic: bool) -> None:
    ranks = kit.ends(measured, engine, automatic)
    mean, total = pytest.approx(float(X.mean()), rel=1e-6), pytest.approx(float(X.sum()), rel=1e-6)
    if engine == "stale":
        assert sum(rank[-1] for rank in ranks) > EPOCHS * SAMPLES, "nothing was trained in vain"
    for row, *_ in ranks:
        assert [row[n] for n in ("mean", "synced", "plain", "hooked")] == [mean] * 4
        assert [row[n] for n in ("total", "sum")] == [total] * 2
        assert (row["samples"], row["largest"]) == (SAMPLES, float(X.max()))
    assert [sum(rank[i] for rank in ranks) for i in (1, 2, 3)] == [EPOCHS * SAMPLES] * 2 + [0]
    if not automatic:  # a step on a dummy, for a batch gone by, keeps what it does
        return
    assert sum(rank[4] for rank in ranks) == EPOCHS * SAMPLES
    every = sorted(X.tolist() * EPOCHS)
    assert sorted(value for rank in ranks for value in rank[5][0]) == every
    assert [sorted(v for r in ranks for v in r[5][2].get(e, ())) for e in range(EPOCHS)] == [X.tolist()] * EPOCHS
    assert sorted(v for rank in ranks for v, times in rank[5][1].items() for _ in range(times)) == every
