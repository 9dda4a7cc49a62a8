"""What hooks set before the first batch of an epoch counts in that epoch, as under stock DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tests.ranks.strangers.kit import UNEVEN, ends, everyone, trainer

ENGINES = ("balanced", "stale", "pipeline", "federated")
DIVIDING = ENGINES[:3]
OPTIONS: dict[str, Any] = {
    "balanced": UNEVEN,
    "pipeline": {"backbone": "net", "plan": {"groups": [
        {"ranks": [0, 1], "cuts": [0, 2, 3], "samples": 16, "micro_samples": 4}]}},
    "federated": {"policy": "fedavg"},
}
FORK: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
EPOCHS = 2


class Numbers(Dataset[Tensor]):
    """Sample i is i and what `stage` says."""

    def __init__(self, n: int = 32) -> None:
        self.n, self.stage = n, -1

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(self.stage)])


class Stages(Sampler[int]):
    """Of 32 samples those of its stage: 16, or more in later stages if it grows."""

    def __init__(self, grows: bool = False) -> None:
        self.stage, self.grows = 0, grows

    def indices(self) -> list[int]:
        return [i for i in range(48) if i // 16 == self.stage or (self.grows and i // 16 < self.stage)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices())

    def __len__(self) -> int:
        return len(self.indices())


class Learns(LightningModule):
    """Notes in each epoch the samples, and the stages that they came with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        self.seen: dict[int, list[tuple[int, int]]] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.setdefault(self.current_epoch, []).extend((int(i), int(s)) for i, s in batch.tolist())
        return (self.net(batch[:, :1] / 32) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def by_epoch(module: Learns, what: int) -> list[list[int]]:
    """Of all ranks: the samples (0) or stages (1) of each epoch, each once."""
    seen, epochs = everyone(module.seen), range(module.current_epoch)
    return [sorted({sample[what] for of_rank in seen for sample in of_rank.get(e, [])}) for e in epochs]


@functools.cache
def by_ddp(situation: Callable[..., Any], *args: bool) -> Any:
    """What rank 0 of stock DDP returns."""
    return ends(situation, "ddp", *args)[0]


# ---- samplers --------------------------------------------------------------------------------------------------


def curriculum(rank: int, world: int, engine: str, own: bool, workers: bool, grows: bool = False) -> list[list[int]]:
    """A sampler whose stage a hook sets: a curriculum, hard negatives (PL#2487)."""
    sampler = Stages(grows)

    class Staged(Learns):
        def on_train_epoch_start(self) -> None:
            sampler.stage = self.current_epoch

    module = Staged()
    loader = DataLoader(Numbers(48), batch_size=8, sampler=sampler, **(FORK if workers else {}))
    more = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3} if grows else {"max_epochs": EPOCHS}
    fits = trainer(rank, world, engine, OPTIONS, use_distributed_sampler=not own, **more)
    if grows:
        module.train_dataloader = lambda: loader
        fits.fit(module)
    else:
        fits.fit(module, loader)
    return by_epoch(module, 0)


@pytest.mark.stock_ddp("data_state")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("own", "workers"), [(False, False), (True, False), (False, True)])
@pytest.mark.short("False-True")
def test_a_samplers_stage_counts_in_the_epoch_that_begins(engine: str, own: bool, workers: bool) -> None:
    want = [list(range(16 * e, 16 * e + 16)) for e in range(EPOCHS)]
    assert ends(curriculum, engine, own, workers)[0] == want


@pytest.mark.parametrize("engine", DIVIDING)
def test_a_sampler_may_grow(engine: str) -> None:
    """Stock DDP, too, counts the batches of an epoch before hooks: with reloading, the stage of the epoch before."""
    seen = ends(curriculum, engine, True, False, True)[0]
    want = by_ddp(curriculum, True, False, True)
    assert [len(epoch) for epoch in seen] == [16, 16, 32] == [len(epoch) for epoch in want]


class Batches(Sampler[list[int]]):
    """A batch sampler that skips what a hook says."""

    def __init__(self) -> None:
        self.skipped = 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[i for i in range(16 * t, 16 * t + 16) if i % 4 != self.skipped] for t in range(2)])

    def __len__(self) -> int:
        return 2


def batch_sampler(rank: int, world: int, engine: str) -> list[list[int]]:
    """A batch sampler told in a hook what to leave out (PL#21448)."""
    batches = Batches()

    class Skipping(Learns):
        def on_train_epoch_start(self) -> None:
            batches.skipped = self.current_epoch

    module = Skipping()
    options = {e: {**OPTIONS.get(e, {}), "batch_sampler": "pool"} for e in DIVIDING}
    options["balanced"] = {"batch_sampler": "pool"}
    trainer(rank, world, engine, options, max_epochs=EPOCHS).fit(module, DataLoader(Numbers(), batch_sampler=batches))
    return by_epoch(module, 0)


@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_a_batch_samplers_state_counts_in_the_epoch_that_begins(engine: str) -> None:
    assert ends(batch_sampler, engine)[0] == [[i for i in range(32) if i % 4 != e] for e in range(EPOCHS)]


def set_epoch(rank: int, world: int, engine: str, own: bool) -> list[Any]:
    """``set_epoch`` with a number of the user's, of Lightning's sampler or of one's own (PL#2487)."""

    class Sets(Learns):
        def on_train_epoch_start(self) -> None:
            loader: Any = self.trainer.train_dataloader
            loader.sampler.set_epoch(7)

        def train_dataloader(self) -> DataLoader:
            data = Numbers()
            sampler = DistributedSampler(data, world, rank, seed=1) if own else None
            return DataLoader(data, batch_size=8, sampler=sampler, shuffle=None if own else True)

    module = Sets()
    trainer(rank, world, engine, OPTIONS, max_epochs=2, limit_train_batches=1).fit(module)
    first = everyone(module.seen)
    return [sorted({i for of_rank in first for i, _ in of_rank.get(e, [])}) for e in range(2)]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("engine", DIVIDING)
def test_an_epoch_of_the_users_counts(engine: str, own: bool) -> None:
    want = by_ddp(set_epoch, own)
    assert want[0] == want[1]
    assert ends(set_epoch, engine, own)[0] == want


# ---- data sets -------------------------------------------------------------------------------------------------


class Data(LightningDataModule):
    """The stage of the data set is set by the module of data, which hears of the epoch from a hook."""

    def __init__(self, workers: bool) -> None:
        super().__init__()
        self.data, self.workers = Numbers(), workers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=8, shuffle=True, **(FORK if self.workers else {}))


def staged_data(rank: int, world: int, engine: str, workers: bool) -> list[list[int]]:
    """A temperature or a current epoch that the data set reads (PL#21448)."""

    class Tells(Learns):
        def on_train_epoch_start(self) -> None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            data.data.stage = self.current_epoch

    module = Tells()
    trainer(rank, world, engine, OPTIONS, max_epochs=EPOCHS).fit(module, datamodule=Data(workers))
    return by_epoch(module, 1)


@pytest.mark.stock_ddp("data_state")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.short("True", "False-pipeline")
def test_a_data_sets_stage_counts_in_the_epoch_that_begins(engine: str, workers: bool) -> None:
    assert ends(staged_data, engine, workers)[0] == [[e] for e in range(EPOCHS)]


# ---- a look before the epoch ------------------------------------------------------------------------------------


def look(rank: int, world: int, engine: str, own: bool) -> dict[str, Any]:
    """A hook looks at the loader, on all ranks or on rank 0 only, before anything is drawn (PL#17847)."""

    class Looks(Learns):
        looked: list[int]

        def on_train_start(self) -> None:
            loader: Any = self.trainer.train_dataloader
            if rank == 0:
                next(iter(loader))
            self.looked = [int(i) for batch in loader for i, _ in batch.tolist()]

    module = Looks()
    sampler = Stages(grows=True)
    sampler.stage = 1
    loader = DataLoader(Numbers(), batch_size=8, sampler=DistributedSampler(Numbers(), world, rank) if own else sampler)
    fits = trainer(rank, world, engine, OPTIONS, max_epochs=1, use_distributed_sampler=not own)
    fits.fit(module, loader)
    seen = [i for of_rank in everyone(module.seen) for i, _ in of_rank.get(0, [])]
    return {"looked": sorted(i for of_rank in everyone(module.looked) for i in of_rank), "trained": sorted(set(seen))}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("engine", DIVIDING)
def test_who_looks_at_the_loader_first_sees_each_sample_once(engine: str, own: bool) -> None:
    facts = ends(look, engine, own)[0]
    assert facts == {"looked": list(range(32)), "trained": list(range(32))}
