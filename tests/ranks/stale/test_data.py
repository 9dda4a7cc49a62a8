"""The stale engine's data: the samples of each batch, the user's loaders, and the Trainer's options for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from lightning_hetero.stale.decide.policy import Flexible
from tests.ranks.data.indexed import Looking, by_name, cut, ddp_order, indexed, refusal
from tests.ranks.data.kit import Backwards, Mirrored, Pairs, of_ranks, per_epoch, replicas, weighted
from tests.ranks.harness import run_ranks
from tests.ranks.kit import regression, stale
from tests.ranks.stale.fits import Noting, Seen, check_once, fit, ticks

pytestmark = pytest.mark.ranks

SAMPLES, BATCH = 26, 4  # on 2 ranks: 3 global batches of 8 and a tail of 2
FREE = {"policy": Flexible()}


def loader(samples: int = SAMPLES, **kwargs: Any) -> DataLoader:
    return DataLoader(indexed(samples), **{"batch_size": BATCH, **kwargs})


# ---- which samples meet in a batch: with a barrier, exactly stock DDP's, or those of the user's samplers ----------


class Reloading(Noting):
    def train_dataloader(self) -> DataLoader:
        self.noted.extra = (self.noted.extra or 0) + 1
        return loader()


def orders(rank: int, world: int) -> dict[str, Seen]:
    def run(data: Any = None, trainer: dict[str, Any] | None = None, **kwargs: Any) -> Seen:
        torch.manual_seed(100 + rank)  # ranks' own random streams differ
        return fit(rank, world, data, **{"max_epochs": 2, **(trainer or {})}, **kwargs)

    own = {"use_distributed_sampler": False}
    pool = {"batch_sampler": "pool"}
    nested = BatchSampler(replicas(DistributedSampler, rank), 4, False)
    return {
        "shuffled": run(loader(shuffle=True)),
        "unshuffled": run(loader()),
        "drop_last": run(loader(drop_last=True)),
        "user": run(loader(30, sampler=Backwards(20))),
        "weighted": run(loader(30, sampler=weighted(seed=rank))),
        "distributed": run(loader(30, sampler=replicas(DistributedSampler, rank))),
        "subclass": run(loader(30, sampler=replicas(Mirrored, rank))),
        "batches as sampler": run(DataLoader(indexed(30), sampler=nested, batch_size=None)),
        "own halves": run(loader(30, sampler=list(range(15 * rank, 15 * rank + 15))), own),
        "pooled": run(DataLoader(indexed(14), batch_sampler=Pairs()), strategy=pool),
        "limit 3": run(loader(), {"limit_train_batches": 3}),
        "limit 0.5": run(loader(), {"limit_train_batches": 0.5}),
        "overfit": run(loader(shuffle=True), {"overfit_batches": 2}),
        "reload": run(None, {"reload_dataloaders_every_n_epochs": 1}, module=Reloading()),
        "look": run(loader(), callbacks=[Looking(4)]),
        "max_steps": run(loader(), {"max_steps": 6}),
    }


@cache
def order_runs() -> dict[str, list[Seen]]:
    return by_name(run_ranks(2, orders))


def expected_of(name: str) -> list[list[int]]:
    whole = ddp_order(SAMPLES, 2 * BATCH, epochs=2)
    pairs: list[list[int]] = []
    for epoch in range(2):
        batches = Pairs()
        batches.set_epoch(epoch)
        pairs += [[i for b in list(batches)[k : k + 2] for i in b] for k in range(0, 7, 2)]
    return {
        "drop_last": lambda: ddp_order(SAMPLES, 8, epochs=2, drop_last=True),
        "user": lambda: per_epoch(Backwards(20), 8, 2),
        "weighted": lambda: per_epoch(weighted(seed=0), 8, 2),  # rank 0's generator
        "distributed": lambda: ddp_order(30, 8, epochs=2, seed=5),
        "subclass": lambda: of_ranks(replicas(Mirrored, 0), replicas(Mirrored, 1))[: 2 * 4],
        "batches as sampler": lambda: ddp_order(30, 8, epochs=2, seed=5),
        "own halves": lambda: of_ranks(list(range(15)), list(range(15, 30)))[: 2 * 4],
        "pooled": lambda: pairs,
        "limit 3": lambda: whole[:3] + whole[4:7],
        "limit 0.5": lambda: whole[:2] + whole[4:6],
        "overfit": lambda: cut(range(SAMPLES), 8)[:2] * 2,
        "max_steps": lambda: whole[:6],
    }.get(name, lambda: whole)()


@pytest.mark.parametrize(
    "name",
    ["shuffled", "unshuffled", "drop_last", "user", "weighted", "distributed", "subclass", "batches as sampler",
     "own halves", "pooled", "limit 3", "limit 0.5", "overfit", "reload", "look", "max_steps"],
)  # fmt: skip
def test_batches_are_those_of_stock_ddp_or_of_the_users_samplers(name: str) -> None:
    runs = order_runs()[name]
    expected = [sorted(batch) for batch in expected_of(name)]
    assert ticks(runs) == expected
    assert {run.steps for run in runs} == {len(expected)}
    assert runs[0].weights.distance(runs[1].weights) == 0.0
    assert sum(run.counts[-1][0] for run in runs) == 2 * sum(map(len, expected))


def test_loaders_are_reloaded_when_asked() -> None:
    assert [run.extra for run in order_runs()["reload"]] == [2, 2]


# ---- loaders of any kind, whatever the timing -----------------------------------------------------------------


class Strict(DataLoader):
    """Needs an argument that nobody else knows, and shows what it got."""

    def __init__(self, dataset: Any, *, secret: int, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.secret = secret


class Listed(Dataset[Any]):
    """Fetches lists of indices."""

    def __init__(self, samples: int) -> None:
        self.data = indexed(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert indices
        return [self.data[i] for i in indices]


def stacked(samples: list[Any]) -> list[Tensor]:
    """A user's collate function: the index comes out doubled and is halved by `Doubled`."""
    index, x, y = (torch.stack(list(column)) for column in zip(*samples, strict=True))
    return [2 * index, x, y]


class Doubled(Noting):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert bool((batch[0] % 2 == 0).all())
        return super().training_step([batch[0] // 2, *batch[1:]], batch_idx)


def kinds(rank: int, world: int) -> dict[str, Seen]:
    def run(data: Any, **kwargs: Any) -> Seen:
        return fit(rank, world, data, **{"strategy": FREE, "max_epochs": 2, **kwargs})

    strict = Strict(indexed(SAMPLES), secret=7, batch_size=BATCH)
    return {
        "collate": run(loader(collate_fn=stacked), module=Doubled()),
        "strict": run(strict, extra=lambda t: (isinstance(t.train_dataloader, Strict), t.train_dataloader.secret)),
        "lists": run(DataLoader(Listed(SAMPLES), batch_size=BATCH)),
        "lists, workers": run(workers(Listed(SAMPLES), batch_size=BATCH)),
        "workers": run(workers(indexed(SAMPLES), batch_size=BATCH, collate_fn=stacked), module=Doubled()),
        "one batch": run(loader(8)),
        "half a batch": run(loader(3)),
        "one sample": run(loader(1)),
        "one sample, workers": run(workers(indexed(1), batch_size=BATCH)),
    }


def workers(dataset: Any, **kwargs: Any) -> DataLoader:
    return DataLoader(dataset, num_workers=2, multiprocessing_context="fork", **kwargs)


@cache
def kind_runs() -> dict[str, list[Seen]]:
    return by_name(run_ranks(2, kinds))


@pytest.mark.parametrize(
    ("name", "samples", "steps"),
    [("collate", SAMPLES, 4), ("strict", SAMPLES, 4), ("lists", SAMPLES, 4), ("lists, workers", SAMPLES, 4),
     ("workers", SAMPLES, 4), ("one batch", 8, 1), ("half a batch", 3, 1), ("one sample", 1, 1),
     ("one sample, workers", 1, 1)],
)  # fmt: skip
def test_every_sample_once_per_epoch(name: str, samples: int, steps: int) -> None:
    runs = kind_runs()[name]
    check_once(runs, [range(samples)] * 2)
    assert {run.steps for run in runs} == {2 * steps}
    assert all(run.weights.distance(runs[0].weights) == 0.0 for run in runs)


def test_a_subclass_with_required_arguments_is_kept() -> None:
    assert [run.extra for run in kind_runs()["strict"]] == [(True, 7)] * 2


# ---- refusals ---------------------------------------------------------------------------------------------------


class Singles(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return regression(30)[index]

    def __len__(self) -> int:
        return 30


def refusals(rank: int, world: int) -> dict[str, str]:
    def no(data: Any, **kwargs: Any) -> str:
        return refusal(rank, world, data, strategy=stale(**kwargs))

    return {
        "batch sampler": no(DataLoader(indexed(30), batch_sampler=Pairs())),
        "single items": no(DataLoader(Singles(), batch_size=None)),
        "no loader": no(iter([])),
        "samples": no(loader(30 + 10 * rank)),
        "batch_size": no(loader(30, batch_size=4 + rank)),
    }


@pytest.mark.stock_ddp("batch_sampler", "stale", refused="needs `batch_sampler='pool'`")
@pytest.mark.stock_ddp("iterable", "stale", refused="needs `stream='finite'`")
@pytest.mark.stock_ddp("no_dataloader", "stale", refused="such batches cannot be divided")
def test_refusals_say_what_and_why() -> None:
    zero, one = run_ranks(2, refusals)
    assert zero == one
    expected: dict[str, Sequence[str]] = {
        "batch sampler": ("TypeError", "BoundedStalenessStrategy(batch_sampler='pool')"),
        "single items": ("TypeError", "DataLoader(batch_size=None)", "set batch_size", "strategy='hetero_balanced'"),
        "no loader": ("TypeError", "of type list_iterator", "pass a torch.utils.data.DataLoader", "hetero_balanced"),
        "samples": ("ValueError", "differ between ranks in samples: {0: 30, 1: 40}"),
        "batch_size": ("ValueError", "differ between ranks in batch_size: {0: 4, 1: 5}"),
    }
    assert zero.keys() == expected.keys()
    for name, parts in expected.items():
        for part in parts:
            assert part in zero[name], f"{name}: {zero[name]}"
