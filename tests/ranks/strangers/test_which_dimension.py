"""Which dimension of a batch is that of the samples is seen from batches of several sizes, never from one."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from tests.ranks.strangers.kit import difference, ends, refusal, trainer, two_stages

N = 8  # of a global batch, the only one
PLANS: dict[str, dict[str, Any]] = {
    "plan": {"backbone": "net", "plan": two_stages(0, 2, 3, samples=N, micro_samples=2)},
    "measured": {"backbone": "net"},
}


class Follows(LightningModule):
    """Forecasts the next step of sequences, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 3)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(self, batch: Any) -> Tensor:
        out, _ = self.rnn(batch[:-1])
        return ((self.net(out) - batch[1:]) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Images(Follows):
    """Means over images of several sizes, which come in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.Linear(3, 3)

    def loss(self, batch: Any) -> Tensor:
        images, targets = batch
        out = self.net(self.rnn(torch.stack([image.mean((1, 2)) for image in images])))
        return torch.stack([((o - t["box"]) ** 2).mean() for o, t in zip(out, targets, strict=True)]).mean()


class Summed(Follows):
    """Divides a sum by the number of samples that its collate function gives with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.Linear(2, 3)

    def loss(self, batch: Any) -> Tensor:
        return ((self.net(self.rnn(batch["x"])) - batch["x"]) ** 2).sum() / batch["n"]


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        drawn = torch.Generator().manual_seed(i)
        box = torch.rand(1 + i % 3, 2, generator=drawn)
        return torch.randn(3, 4 + i % 2, 5, generator=drawn), {"box": box.mean(0), "id": i}


def sequences(steps: int) -> Any:
    return TensorDataset(torch.randn(N, steps, 2, generator=torch.Generator().manual_seed(1)).cumsum(1))


def time_first(samples: Any) -> Any:
    return torch.stack([s[0] for s in samples], dim=1)


def zipped(samples: Any) -> Any:
    return tuple(zip(*samples, strict=True))


def with_count(samples: Any) -> Any:
    return {"x": default_collate(samples)[0], "n": len(samples)}


CASES: dict[str, Any] = {
    "as many steps as samples": (Follows, sequences(N), time_first),
    "other steps": (Follows, sequences(5), time_first),
    "three images of three channels": (Images, Pictures(), zipped),
    "a number of samples": (Summed, sequences(5), with_count),
}


def trained(rank: int, world: int, engine: str, plan: str) -> dict[str, float]:
    """PL#10093, PL#2439: time-major sequences, tuples of images, a batch that says how many samples it has."""
    found = {}
    for name, (make, data, collate) in CASES.items():
        torch.manual_seed(1)
        module = make()
        oracle = copy.deepcopy(module)
        loss = oracle.loss(collate([data[i] for i in range(len(data))]))
        grads = torch.autograd.grad(loss, [*oracle.parameters()])
        with torch.no_grad():
            for p, g in zip(oracle.parameters(), grads, strict=True):
                p -= 0.1 * g
        options = dict(PLANS[plan])
        if "plan" in options and len(data) != N:
            lone = [{"ranks": [r], "cuts": [0, 3], "samples": 3, "micro_samples": 1} for r in range(2)]
            options["plan"] = {"groups": lone}
        trained = trainer(rank, world, engine, {engine: options})
        trained.fit(module, DataLoader(data, batch_size=len(data) // world, collate_fn=collate))
        found[name] = difference(module, oracle)
    return found


@pytest.mark.stock_ddp("time_major", "pipeline")
@pytest.mark.parametrize("plan", list(PLANS))
def test_batches_are_cut_where_they_follow_their_size(plan: str) -> None:
    for found in ends(trained, "pipeline", plan):
        assert all(off < 1e-5 for off in found.values()), found


def one_kind(rank: int, world: int, engine: str, collate: Any, bad: tuple[int, ...] = ()) -> None:
    """pytorch#57429: the collate function leaves out what the dataset has found damaged; PL#10093."""

    class Some(Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, i: int) -> Any:
            return None if i in bad else torch.randn(5, 2)

    options = {engine: {"backbone": "net", "plan": two_stages(0, 2, 3, samples=16)}}
    trainer(rank, world, engine, options).fit(Follows(), DataLoader(Some(), batch_size=8, collate_fn=collate))


def good_ones(samples: Any) -> Any:
    return torch.stack([s for s in samples if s is not None], dim=1)


def similarities(samples: Any) -> Any:
    return torch.zeros(len(samples), len(samples))


@pytest.mark.stock_ddp("left_out", "pipeline", refused="it is unknown how to cut such a batch")
@pytest.mark.parametrize(
    ("collate", "bad", "reason"),
    [
        (good_ones, (1, 2), r"has the shapes \(5, 2, 2\), \(5, 1, 2\), \(5, 1, 2\) in batches of 4, 3 and 2 samples"),
        (good_ones, (11,), r"has the shape \(5, 15, 2\) in a batch of 16 samples: did the collate function leave"),
        (similarities, (), "it is not known which dimension is that of the samples"),
    ],
)
def test_batches_that_do_not_are_refused(collate: Any, bad: tuple[int, ...], reason: str) -> None:
    error = refusal(one_kind, "pipeline", collate, bad)
    assert re.search(reason, error) and "split_batch(batch, sizes)" in error and "strategy='hetero_balanced'" in error
