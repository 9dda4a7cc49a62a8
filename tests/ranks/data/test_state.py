"""Loaders and datasets with a state (`state_dict`), and DataLoaders with an iterator of their own: exact or refused.

The stand-ins have the protocol of torchdata's `StatefulDataLoader`; the packages themselves where they are installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.ranks.data.indexed import refusal
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, balanced, rank_trainer, single, stale, weights
from tests.ranks.resume_kit import EPOCHS, Noting, Result, Saver, check, data, fit, joined, oracle

SAMPLES, BATCH = 96, 16  # 6 global batches, on 2 ranks
STOPS = (1, 2)  # epoch, and the last batch of it before the checkpoint
DONE = 9


class StateLoader(DataLoader):
    """Counts the batches that it hands out, and leaves out as many of the next iteration once the number is loaded."""

    next_iter_state: Any = None
    last = None

    def __iter__(self) -> Any:
        skipped, self.next_iter_state = (self.next_iter_state or {"yielded": 0})["yielded"], None
        self.last: Any = super().__iter__()
        self.last._sampler_iter, self.last._num_yielded = islice(self.last._index_sampler, skipped, None), skipped
        return self.last

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": 0 if self.last is None else self.last._num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_iter_state = state


class StateData(TensorDataset):
    """Its samples depend on how many were fetched before."""

    fetched = 0

    def __getitem__(self, i: int) -> Any:
        self.fetched += 1
        index, x, y = super().__getitem__(i)
        return index, x + 0.001 * self.fetched, y

    def state_dict(self) -> dict[str, int]:
        return {"fetched": self.fetched}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.fetched = state["fetched"]


class DataStateLoader(StateLoader):
    """Stores its dataset's state, too."""

    def __iter__(self) -> Any:
        stored = (self.next_iter_state or {}).get("dataset")
        begun = super().__iter__()
        if stored is not None:
            self.dataset.load_state_dict(stored)  # type: ignore[attr-defined]
        return begun

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dataset": self.dataset.state_dict()}  # type: ignore[attr-defined]


def state_loader(kind: type[DataLoader] = StateLoader, dataset: Any = None, **kwargs: Any) -> DataLoader:
    return kind(data(SAMPLES) if dataset is None else dataset, batch_size=BATCH // 2, **kwargs)


# ---- the loader has a state: the engine's position counts ---------------------------------------------------------


def engines() -> dict[str, Any]:
    return {"balanced": balanced(), "stale": stale(policy="bsp")}


def resumed(rank: int, world: int, folder: str) -> dict[str, tuple[Result, Result]]:
    """Of each engine the run that saves and the run that goes on, and an engine that goes on from stock DDP's."""
    at = "batch-{}-{}.ckpt".format(*STOPS)
    runs = {}
    for name, strategy in engines().items():
        whole = fit(rank, world, strategy, state_loader(), callbacks=[Saver(f"{folder}/{name}", [STOPS])])
        rest = fit(rank, world, engines()[name], state_loader(), ckpt=f"{folder}/{name}/{at}")
        runs[name] = whole, rest
    stock = DDPStrategy(process_group_backend="gloo")
    whole = fit(rank, world, stock, state_loader(), callbacks=[Saver(f"{folder}/stock", [STOPS])])
    runs["stock"] = whole, fit(rank, world, balanced(), state_loader(), ckpt=f"{folder}/stock/{at}")
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Result, Result]]]:
    folder = tmp_path_factory.mktemp("state")
    found = run_ranks(2, resumed, str(folder))
    state = torch.load(folder / "stock" / "batch-1-2.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert state["combined_loader"] == [{"yielded": 3}]  # what an engine must not skip a second time
    return found


@cache
def expected() -> Result:
    return oracle(samples=SAMPLES)


@pytest.mark.parametrize("name", ["balanced", "stale", "stock"])
def test_a_loader_with_a_state_resumes_at_the_next_sample(name: str, runs: list[Any]) -> None:
    check([rank[name][0] for rank in runs], expected(), 0, "uninterrupted")
    check([rank[name][1] for rank in runs], expected(), DONE, "resumed")


# ---- the dataset has one, too: its samples are not moved ----------------------------------------------------------


def with_datasets_state(rank: int, world: int, folder: str) -> tuple[Result, Result, Result, list[str]]:
    def loader() -> DataLoader:
        return state_loader(DataStateLoader, StateData(*data(SAMPLES).tensors))

    stock = fit(rank, world, DDPStrategy(process_group_backend="gloo"), loader())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        whole = fit(rank, world, balanced(), loader(), callbacks=[Saver(folder, [STOPS])])
    rest = fit(rank, world, balanced(), loader(), ckpt=f"{folder}/batch-1-2.ckpt")
    return stock, whole, rest, [str(w.message) for w in said if "equal parts" in str(w.message)]


def test_a_dataset_with_a_state_trains_and_resumes_as_under_stock_ddp(tmp_path: Any) -> None:
    ranks = run_ranks(2, with_datasets_state, str(tmp_path))
    for stock, whole, rest, _ in ranks:
        assert stock[1] == whole[1] and stock[1][DONE:] == rest[1]
        assert all(torch.equal(stock[0][k], run[0][k]) for run in (whole, rest) for k in stock[0])
    assert "StateData has a state" in ranks[0][3][0] and "torch.utils.data.DataLoader" in ranks[0][3][0]


# ---- iterators of strangers ---------------------------------------------------------------------------------------


class Changing(DataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for index, x, y in super().__iter__():
            yield index, 2 * x, y


class Dropping(DataLoader):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch for number, batch in enumerate(super().__iter__()) if number != 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([data(SAMPLES)[i] for i in range(SAMPLES)])


class Endless(Stream):
    def __iter__(self) -> Iterator[Any]:
        return cycle(super().__iter__())


def streamed(rank: int, world: int, folder: str) -> list[tuple[Result, Result]]:
    """Of a stream that all ranks read, and of the ranks' own, the run that saves and the one that goes on."""

    def trained(dataset: Stream, mode: str, *, ckpt: str | None = None) -> Result:
        loader, saver = state_loader(StateLoader, dataset), Saver(f"{folder}/{mode}", [STOPS])
        return fit(
            rank, world, balanced(stream=mode), loader, ckpt=ckpt, callbacks=[saver], limit_train_batches=6
        )  # fmt: skip

    at = "batch-1-2.ckpt"
    kinds = ("shared", Stream), ("infinite", Endless)
    return [(trained(of(), mode), trained(of(), mode, ckpt=f"{folder}/{mode}/{at}")) for mode, of in kinds]


def without_place(rank: int, world: int, ckpt: str) -> str:
    with pytest.raises(ValueError) as refused:
        loader = state_loader(StateLoader, Endless())
        fit(rank, world, balanced(stream="infinite", global_batch_size=BATCH), loader, ckpt=ckpt)
    return str(refused.value)


def test_streams_behind_a_loader_with_a_state_resume_at_the_next_sample(tmp_path: Any) -> None:
    ranks = run_ranks(2, streamed, str(tmp_path))
    whole, rest = ([rank[0][run] for rank in ranks] for run in range(2))
    assert joined(whole) == [list(range(i, i + BATCH)) for _ in range(EPOCHS) for i in range(0, SAMPLES, BATCH)]
    check(rest, (whole[0][0], joined(whole)), DONE, "resumed")
    for _, ((_, before), (_, after)) in ranks:  # which samples a batch has depends on its shares
        read = [i for batch in before[6:DONE] + after[: 2 * 6 - DONE] for i in batch]
        assert read == list(islice(cycle(range(SAMPLES)), len(read)))
    for said in run_ranks(3, without_place, str(tmp_path / "infinite" / "batch-1-2.ckpt")):
        assert "an infinite stream cannot be repositioned" in said and "torch.utils.data.DataLoader" in said


def loaded() -> DataLoader:
    loader: Any = state_loader()
    loader.load_state_dict({"yielded": 3})
    return loader


def strangers(rank: int, world: int) -> tuple[Weights, list[str], dict[str, str]]:
    module = Noting()
    rank_trainer(rank, world, balanced(), max_epochs=EPOCHS).fit(module, state_loader(Changing))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(rank, world, balanced(stream="shared"), state_loader(Changing, Stream()))
    refused = {
        "changed by stale": refusal(rank, world, state_loader(Changing), strategy=stale()),
        "dropped": refusal(rank, world, state_loader(Dropping)),
        "loaded": refusal(rank, world, loaded()),
    }
    return weights(module), [str(w.message) for w in said if "equal parts" in str(w.message)], refused


def test_iterators_of_strangers_are_kept_or_refused() -> None:
    ranks, one = run_ranks(2, strangers), Noting()
    single(one, data(SAMPLES), BATCH, loader=Changing, max_epochs=EPOCHS)
    assert all(kept.distance(weights(one)) < 1e-12 for kept, _, _ in ranks)
    assert "Changing has its own iterator" in ranks[0][1][0]
    refused = ranks[0][2]
    assert refused == ranks[1][2]
    assert "Changing has its own iterator" in refused["changed by stale"]
    assert "hetero_balanced" in refused["changed by stale"]
    assert "drawn 2 batches" in refused["dropped"] and "each batch of super().__iter__()" in refused["dropped"]
    assert "load_state_dict of the train loader (StateLoader) was called" in refused["loaded"]
