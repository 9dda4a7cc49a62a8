"""The user's loaders as they are: batches of any type, subclasses, workers and read-ahead, several at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.ranks.data.indexed import EXACT, Fit, Noting, by_name, ddp_order, fit, indexed, together
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, quiet_trainer, single, weights

# ---- batches of any type, loaders of any class -------------------------------------------------------------


@dataclass
class Pair:
    index: Tensor
    x: Tensor
    y: Tensor


class Graph:
    """Moves itself, like a graph library's batch."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self.index = torch.stack([s[0] for s in samples])
        self.x, self.y = torch.stack([s[1] for s in samples]), torch.stack([s[2] for s in samples])
        self.device: Any = None

    def to(self, device: Any, **_: Any) -> Graph:
        self.device = device
        return self


class Described(Dataset[Any]):
    """A string and tensors."""

    def __getitem__(self, i: int) -> Any:
        index, x, y = indexed(24)[i]
        return f"sample {int(index)}", x, y

    def __len__(self) -> int:
        return 24


class Dicts(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        index, x, y = indexed(24)[i]
        return {"index": index, "inner": {"x": x}, "y": [y]}

    def __len__(self) -> int:
        return 24


class Unpacking(Noting):
    """Understands each of the batches below; logs nothing, so nobody has to guess a batch size."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            index, x, y = batch["index"], batch["inner"]["x"], batch["y"][0]
        elif isinstance(batch, Pair | Graph):
            index, x, y = batch.index, batch.x, batch.y
        else:
            index, x, y = batch
        if isinstance(batch, Graph):
            assert batch.device == self.device
        if isinstance(index, Tensor):
            self.note(index.tolist())
        else:
            assert len(index) == len(x)
            self.note([int(text.removeprefix("sample ")) for text in index])
        return self.loss((x, y))


class FromPath(DataLoader):
    """Required arguments, and attributes under other names: nobody can build it again."""

    def __init__(self, path: str, *, per_step: int) -> None:
        self.source = path
        super().__init__(indexed(len(path)), batch_size=per_step, shuffle=True)


class WithLoader(Unpacking):
    def train_dataloader(self) -> Any:
        return FromPath("x" * 24, per_step=3)


def pair(samples: Sequence[Any]) -> Pair:
    graph = Graph(samples)
    return Pair(graph.index, graph.x, graph.y)


def types(rank: int, world: int) -> dict[str, Fit]:
    loaders: dict[str, Any] = {
        "tuple": DataLoader(indexed(24), batch_size=3),
        "dict": DataLoader(Dicts(), batch_size=3),
        "strings": DataLoader(Described(), batch_size=3),
        "dataclass": DataLoader(indexed(24), batch_size=3, collate_fn=pair),
        "graph": DataLoader(indexed(24), batch_size=3, collate_fn=Graph),
        "subclass": FromPath("x" * 24, per_step=3),
    }
    runs = {name: fit(rank, world, loader, module=Unpacking()) for name, loader in loaders.items()}
    return {**runs, "train_dataloader": fit(rank, world, None, module=WithLoader())}


@cache
def type_runs() -> tuple[dict[str, list[Fit]], Weights]:
    oracle = Noting()
    single(oracle, indexed(24), 6, max_epochs=3)
    return by_name(run_ranks(2, types)), weights(oracle)


@pytest.mark.stock_ddp("batch_kinds", "subclasses", "balanced")
@pytest.mark.parametrize(
    "name", ["tuple", "dict", "strings", "dataclass", "graph", "subclass", "train_dataloader"]
)
def test_batches_and_loaders_stay_the_users(name: str) -> None:
    runs, oracle = type_runs()
    assert together(runs[name]) == ddp_order(24, 6)
    assert all(run.weights.distance(oracle) < EXACT for run in runs[name])


# ---- several loaders ---------------------------------------------------------------------------------------


class Twofold(Noting):
    """Trains on two loaders at once; one may have run out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(part[1:]) for part in batch.values() if part is not None]
        self.note([i for part in batch.values() if part is not None for i in part[0].tolist()])
        return torch.stack(losses).sum()


def offset(samples: int, first: int) -> Dataset[Any]:
    whole = indexed(first + samples)
    return torch.utils.data.TensorDataset(*(t[first:] for t in whole.tensors))


MODES = ("min_size", "max_size_cycle", "max_size")
WIDE = {"samples": 64, "batch": 8}  # 8 steps; the narrow loader has 5
NARROW = {"samples": 20, "batch": 4}


def two_loaders(make: Callable[[Dataset[Any], int], DataLoader], mode: Any) -> CombinedLoader:
    loaders = {
        "narrow": make(offset(NARROW["samples"], 0), NARROW["batch"]),
        "wide": make(offset(WIDE["samples"], 100), WIDE["batch"]),
    }
    return CombinedLoader(loaders, mode)


def combined(rank: int, world: int) -> dict[str, Fit]:
    def make(data: Dataset[Any], size: int) -> DataLoader:
        return DataLoader(data, batch_size=size // world)

    def ahead(data: Dataset[Any], size: int) -> DataLoader:
        return DataLoader(data, batch_size=size // world, num_workers=1, multiprocessing_context="fork")

    def one_ahead(data: Dataset[Any], size: int) -> DataLoader:
        return (ahead if size == NARROW["batch"] else make)(data, size)

    runs = {mode: fit(rank, world, two_loaders(make, mode), module=Twofold()) for mode in MODES}
    return {**runs, "uneven read-ahead": fit(rank, world, two_loaders(one_ahead, "max_size_cycle"), module=Twofold())}


@cache
def combined_runs() -> dict[str, list[Fit]]:
    return by_name(run_ranks(2, combined))


@pytest.mark.stock_ddp("train_loaders", "balanced")
@pytest.mark.parametrize("name", [*MODES, "uneven read-ahead"])
def test_combined_loaders_train_like_one_process(name: str) -> None:
    """Batches in the ratio 1 : 2 have shares in the same ratio, so the common loss has one exact weight."""

    def make(data: Dataset[Any], size: int) -> DataLoader:
        sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)  # type: ignore[arg-type]
        return DataLoader(data, batch_size=size, sampler=sampler)

    oracle = Twofold()
    trainer = quiet_trainer(devices=1, max_epochs=3)
    trainer.fit(oracle, two_loaders(make, name if name in MODES else "max_size_cycle"))
    runs = combined_runs()[name]
    assert [sorted(b) for b in together(runs)] == [sorted(b) for b in oracle.seen]  # type: ignore[arg-type]
    steps = [tuple(map(len, step)) for step in zip(*(r.seen for r in runs), strict=True)]
    assert len(steps) == 3 * (5 if name == "min_size" else 8)
    assert len({s for s in steps if sum(s) == 12}) > 1  # shares did change
    for run in runs:
        assert run.weights.distance(weights(oracle)) < EXACT
