"""Batches whose rows are not what a step expects: kept state, samples left out, several loaders of unlike sizes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.ranks.kit import Scripted
from tests.ranks.strangers.kit import UNEVEN, ends, everyone, refusal, trainer

ENGINES = ("balanced", "stale", "pipeline")
PIPELINE: dict[str, Any] = {"backbone": "net"}


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.arange(p.numel(), dtype=p.dtype).reshape(p.shape) / 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def numbers(n: int = 32) -> TensorDataset:
    return TensorDataset(torch.arange(float(n), dtype=torch.float64)[:, None] / n)


# ---- kept state ------------------------------------------------------------------------------------------------


class KeepsState(Plain):
    """A recurrent net's state, one row for each stream."""

    state: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        x = x if self.state is None else x + 0 * self.state
        self.state = x.detach()
        return (self.net(x) ** 2).mean()


def state_between_batches(rank: int, world: int, engine: str, equal: bool) -> int:
    """A hidden state is kept from batch to batch (PL#655)."""
    changing = {"policy": Scripted(), "exchange_every": 1}
    fits = trainer(rank, world, engine, {"balanced": {"rebalance": False} if equal else changing, "pipeline": PIPELINE})
    fits.fit(KeepsState(), DataLoader(numbers(128), batch_size=8))
    return fits.global_step


@pytest.mark.stock_ddp("row_state", "stale", "pipeline", refused="batches differ in rows")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_state_kept_by_row_is_refused_with_the_way_out(engine: str) -> None:
    told = refusal(state_between_batches, engine, False)
    assert "strategy='hetero_balanced' as LoadBalancedStrategy(rebalance=False)" in told


@pytest.mark.stock_ddp("row_state", "balanced", differs="needs `rebalance=False`")
def test_a_state_kept_by_row_trains_with_equal_parts() -> None:
    assert ends(state_between_batches, "balanced", True) == [8, 8]


def wrong_from_the_start(rank: int, world: int, engine: str) -> None:
    """A plain mistake in the first step is left in its own words."""

    class Wrong(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (batch[0] @ torch.ones(2, 3, dtype=torch.float64)).mean()

    trainer(rank, world, engine, {"balanced": UNEVEN}).fit(Wrong(), DataLoader(numbers(), batch_size=8))


def test_a_mistake_in_the_first_step_stays_in_its_own_words() -> None:
    assert "rebalance" not in refusal(wrong_from_the_start, "balanced")


# ---- samples left out --------------------------------------------------------------------------------------------


class Spoilt(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return None if index in (1, 11) else (torch.tensor([index / 16], dtype=torch.float64),)


def the_good_ones(samples: list[Any]) -> Any:
    return [torch.stack([s[0] for s in samples if s is not None])]


def spoilt_samples(rank: int, world: int, engine: str, weighted: bool) -> dict[str, Any]:
    """A collate function leaves out what could not be read (pytorch#57429)."""
    rows = {"batch_weight": lambda batch: len(batch[0])} if weighted else {}
    module = Plain()
    fits = trainer(rank, world, engine, {"balanced": {**UNEVEN, **rows}, "stale": {"policy": "bsp", **rows}},
                   max_epochs=4)  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fits.fit(module, DataLoader(Spoilt(), batch_size=8, collate_fn=the_good_ones))
    one = Plain()
    optimizer = one.configure_optimizers()
    (x,) = the_good_ones([Spoilt()[i] for i in range(16)])
    for _ in range(4):
        optimizer.zero_grad()
        one.training_step([x], 0).backward()
        optimizer.step()
    off = max(float((a - b).abs().max()) for a, b in zip(module.parameters(), one.parameters(), strict=True))
    return {"off": off, "told": everyone([str(w.message) for w in told if "leaves samples out" in str(w.message)])}


@pytest.mark.stock_ddp("left_out", "balanced", "stale", differs="needs `batch_weight`, as a warning says")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_batches_with_fewer_rows_are_weighted_by_what_the_user_says(engine: str) -> None:
    facts = ends(spoilt_samples, engine, True)[0]
    assert facts["off"] < 1e-9 and facts["told"] == [[], []]


@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_batches_with_fewer_rows_are_told_once(engine: str) -> None:
    told = ends(spoilt_samples, engine, False)[0]["told"]
    assert any(told) and all(len(of_rank) <= 1 for of_rank in told)
    assert "batch_weight" in str(told)


# ---- several loaders ---------------------------------------------------------------------------------------------


def two_loaders(rank: int, world: int, engine: str) -> dict[str, Any]:
    """A large and a small loader side by side, with bounds on the samples of a rank (PL#10373)."""

    class Both(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, list[int]] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            for name, (x,) in batch.items():
                self.seen.setdefault(name, []).append(len(x))
            return sum((self.net(x) ** 2).mean() for (x,) in batch.values())  # type: ignore[return-value]

    module = Both()
    loaders = {"a": DataLoader(numbers(), batch_size=8), "b": DataLoader(numbers(16), batch_size=4)}
    trainer(rank, world, engine, {"balanced": UNEVEN}).fit(module, CombinedLoader(loaders, "min_size"))
    return module.seen


@pytest.mark.stock_ddp("train_loaders", "balanced")
def test_bounds_are_of_the_largest_loaders_batches() -> None:
    assert ends(two_loaders, "balanced") == [{"a": [12, 12], "b": [6, 6]}, {"a": [4, 4], "b": [2, 2]}]
