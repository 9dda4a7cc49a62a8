"""What users gather over ranks whose parts are of unequal size: rows of all of them, in order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from tests.ranks.strangers import kit

SAMPLES = 37  # two global batches of 16 and one of 5


class Gathering(LightningModule):
    """Gathers rows in the step and at the end of the epoch, in the ways that people flatten them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 2)
        self.kept: list[Tensor] = []
        self.in_step: list[list[float]] = []
        self.every: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.kept.append(x)
        if getattr(self.trainer.strategy, "engine", "") != "stale":
            self.in_step.append(rows(self.all_gather(x)))
        return self.net(x).square().mean()

    def on_train_epoch_end(self) -> None:
        own = torch.cat(self.kept)
        self.kept = []
        gathered: Any = self.all_gather({"two": own, "one": own.flatten(), "time": own.T, "number": len(own)})
        self.every = {
            "flatten": rows(gathered["two"]),
            "view": rows(gathered["two"].view(-1, 1)),
            "dims": rows(gathered["two"].flatten(0, 1)),
            "cat": rows(torch.cat(list(gathered["one"]))),
            "unbind": rows(torch.cat(gathered["one"].unbind())),
            "time": rows(torch.cat(list(gathered["time"]), dim=1)),
            "number": [float(gathered["number"].sum())],
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows(value: Any) -> list[float]:
    return sorted(value.flatten().tolist())


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), batch_size=8)


def gathered(rank: int, world: int, engine: str) -> tuple[dict[str, list[float]], list[list[float]]]:
    """PL#17085, bolts#791: predictions of an epoch, and of a step, of all ranks."""
    module = Gathering()
    options = {"balanced": kit.UNEVEN, "stale": {"policy": "bsp"}}
    kit.trainer(rank, world, engine, options, max_epochs=2).fit(module, loader())
    return module.every, module.in_step


@pytest.mark.stock_ddp("all_gather_hook", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_all_rows_come(engine: str) -> None:
    whole = [float(i) for i in range(SAMPLES)]
    for every, in_step in kit.ends(gathered, engine):
        assert every == {key: [float(SAMPLES)] if key == "number" else whole for key in every}
        assert in_step == [] or [len(one) for one in in_step] == [16, 16, 5] * 2


class Contrast(LightningModule):
    """A loss of every row against the rows of all ranks, through which gradients flow: bolts#791 and SimCLR."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(3, 2).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.net(batch[0])
        everyone = z
        if self.trainer.world_size > 1:
            everyone = torch.as_tensor(self.all_gather(z, sync_grads=True)).flatten(0, 1)
        return torch.logsumexp(z @ everyone.T, dim=1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def contrasted(rank: int, world: int, engine: str) -> float:
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(16, 3).double())
    one, module = Contrast(), Contrast()
    kit.trainer(rank, world, "single", max_epochs=2).fit(one, DataLoader(data, batch_size=16))
    options = {"balanced": {**kit.UNEVEN}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="self.all_gather of rows with gradients")
        kit.trainer(rank, world, engine, options, max_epochs=2).fit(module, DataLoader(data, batch_size=8))
    return kit.difference(module, one)


@pytest.mark.stock_ddp("all_gather_step", "balanced")
def test_gradients_flow_through_what_is_gathered() -> None:
    assert max(kit.ends(contrasted, "balanced")) < 1e-12


class Ragged(Gathering):
    def on_train_epoch_end(self) -> None:
        own = torch.cat(self.kept)
        self.all_gather(own.expand(len(own), 2 + self.global_rank))


def ragged(rank: int, world: int, engine: str) -> None:
    """PL#17085: sequences that are padded to another length on each rank."""
    kit.trainer(rank, world, engine, {"balanced": kit.UNEVEN}, max_epochs=1).fit(Ragged(), loader())


@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_what_cannot_be_put_together_is_refused(engine: str) -> None:
    said = kit.refusal(ragged, engine)
    assert "all_gather of tensors of the shapes" in said and "pad the others" in said


class Numbers(LightningModule):
    """Averages its losses by hand: the plain way, and in both ways that are right."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.metric = MeanMetric(dist_sync_on_step=True)
        self.ways: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        value, n = x.mean(), torch.tensor(float(len(x)))
        self.all_gather(value)
        by_strategy: Any = self.trainer.strategy.reduce(value.clone(), reduce_op="mean")
        sums: Any = self.all_gather(torch.stack([value * n, n]))
        self.ways.append((float(by_strategy), float(sums.sum(0)[0] / sums.sum(0)[1])))
        self.metric(x.flatten())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def averaged(rank: int, world: int, engine: str) -> tuple[list[tuple[float, float]], float, list[str]]:
    """PL#6200: losses of a step gathered by hand; PL#5865: a metric that synchronises in every step."""
    module = Numbers()
    data = TensorDataset(torch.arange(16.0).unsqueeze(1))
    trainer = kit.trainer(rank, world, engine, {"balanced": kit.UNEVEN}, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=8))
    said = [str(w.message) for w in caught if "all_gather of a number" in str(w.message)]
    return module.ways, float(trainer.callback_metrics["metric"]), said


@pytest.mark.stock_ddp("torchmetrics", "balanced")
def test_means_of_gathered_numbers() -> None:
    for rank, (ways, metric, said) in enumerate(kit.ends(averaged, "balanced")):
        assert ways == [(7.5, 7.5)] * 2 and metric == 7.5
        assert len(said) == (rank == 0)


def lone(rank: int, world: int, engine: str) -> list[list[float]]:
    """PL#5060: in the last batch one rank has no sample; its dummy's row is nobody's."""
    module = Gathering()
    data = DataLoader(TensorDataset(torch.arange(17.0).unsqueeze(1)), batch_size=8)
    kit.trainer(rank, world, engine, {"balanced": kit.UNEVEN}, max_epochs=1).fit(module, data)
    return module.in_step


def test_a_dummy_is_not_gathered() -> None:
    for in_step in kit.ends(lone, "balanced"):
        assert sorted(row for step in in_step for row in step) == [float(i) for i in range(17)]
