"""Pins what `lightning_compat.loaders` reads and replaces: the loaders of a fit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_hetero import lightning_compat as compat
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, quiet_trainer, rank_trainer, regression
from tests.ranks.lightning_compat.kit import BATCH, SAMPLES, VERSIONS, Ask, Validated, fit


def test_train_loaders() -> None:
    ask = Ask(compat.train_loaders, "on_train_batch_start")
    trainer = quiet_trainer(devices=1, callbacks=[ask], max_epochs=1)
    assert compat.train_loaders(trainer) == []
    loaders = {name: DataLoader(regression(SAMPLES), batch_size=BATCH) for name in "ab"}

    class Two(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    trainer.fit(Two(), loaders)
    found = ask.answers["on_train_batch_start"][0]
    assert len(found) == 2 and found[0] is loaders["a"] and found[1] is loaders["b"], VERSIONS


def test_val_loaders() -> None:
    ask = Ask(compat.val_loaders, "on_train_batch_start")
    trainer = quiet_trainer(devices=1, callbacks=[ask], max_epochs=1, num_sanity_val_steps=1)
    assert compat.val_loaders(trainer) == []
    loaders = [DataLoader(regression(SAMPLES), batch_size=BATCH) for _ in range(2)]

    class Two(Toy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None: ...

    trainer.fit(Two(), DataLoader(regression(SAMPLES), batch_size=BATCH), loaders)
    found = ask.answers["on_train_batch_start"][0]
    assert len(found) == 2 and found[0] is loaders[0] and found[1] is loaders[1], VERSIONS


@pytest.mark.parametrize(("limit", "expected"), [(1.0, 4), (0.5, 2), (3, 3), (99, 4)])
def test_fetch_limit(limit: float, expected: int) -> None:
    ask = Ask(compat.fetch_limit, "on_train_batch_start")
    trainer = quiet_trainer(devices=1, callbacks=[ask], max_epochs=1, limit_train_batches=limit)
    assert compat.fetch_limit(trainer) == float("inf")
    trainer.fit(Toy(), DataLoader(regression(SAMPLES), batch_size=BATCH))
    assert set(ask.answers["on_train_batch_start"]) == {expected}, VERSIONS


@pytest.mark.parametrize(("limit", "expected"), [(1.0, [10, 10]), (0.5, [5, 5]), (7, [7, 7]), (3, [3, 3])])
@pytest.mark.parametrize("begin", [False, True])
def test_count_val_batches(limit: float, expected: list[int], begin: bool) -> None:
    """A loader that is longer from the second validation on; known before it begins, or when it has just begun."""
    lengths: list[int] = []

    class Longer(Validated):
        def grow(self) -> None:
            if self.trainer.current_epoch == 1:
                loader = self.trainer.val_dataloaders
                assert loader is compat.val_loaders(self.trainer)[0]
                loader.sampler.data_source = loader.dataset  # a sampler of the first samples only, until now
                compat.count_val_batches(self.trainer, begin=begin)

        def on_train_epoch_start(self) -> None:
            if not begin:
                self.grow()

        def on_validation_start(self) -> None:
            if begin:
                self.grow()
            lengths.append(0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch_idx == lengths[-1], VERSIONS
            lengths[-1] += 1

    data = regression(10 * BATCH)
    loader = DataLoader(data, batch_size=BATCH, sampler=SequentialSampler(range(4 * BATCH)))
    trainer = quiet_trainer(devices=1, max_epochs=3, limit_val_batches=limit)
    trainer.fit(Longer(), DataLoader(regression(SAMPLES), batch_size=BATCH), loader)
    first = {1.0: 4, 0.5: 2, 7: 4, 3: 3}[limit]
    assert lengths == [first, *expected], VERSIONS


@pytest.mark.parametrize(("batches", "expected"), [(0.0, False), (2, True), (0.5, True)])
@pytest.mark.filterwarnings("ignore:.*overfit.*")
def test_overfits(batches: float, expected: bool) -> None:
    assert compat.overfits(quiet_trainer(devices=1, overfit_batches=batches)) is expected, VERSIONS


@pytest.mark.parametrize("wanted", [True, False])
def test_uses_distributed_sampler(wanted: bool) -> None:
    trainer = quiet_trainer(devices=1, use_distributed_sampler=wanted)
    assert compat.uses_distributed_sampler(trainer) is wanted, VERSIONS


def test_uses_dataloader_iter() -> None:
    class Own(Toy):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    ask = Ask(compat.uses_dataloader_iter, "on_train_start")
    fit(ask)
    assert ask.answers["on_train_start"] == [False], VERSIONS
    trainer = quiet_trainer(devices=1)
    trainer.strategy.connect(Own())
    assert compat.uses_dataloader_iter(trainer) is True, VERSIONS


def kept_samplers(rank: int, world: int) -> list[str]:
    """Samplers of the train and the validation loader: kept, and after the undo as Lightning would have them."""
    names = []
    for keep in (True, False):
        ask = Ask(
            lambda t: [type(x.sampler).__name__ for x in (compat.train_loaders(t)[0], t.val_dataloaders)],
            "on_validation_end",
        )
        trainer = rank_trainer(rank, world, "ddp", max_epochs=1, callbacks=[ask])
        undo = compat.keep_train_sampler(trainer)
        if not keep:
            undo()
            undo()  # twice does no harm
        train, valid = (DataLoader(regression(SAMPLES), batch_size=BATCH, shuffle=i == 0) for i in range(2))
        trainer.fit(Validated(), train, valid)
        names += ask.answers["on_validation_end"][0]
    return names


def test_keep_train_sampler() -> None:
    distributed = DistributedSampler.__name__
    expected = ["RandomSampler", distributed, distributed, distributed]
    assert run_ranks(2, kept_samplers) == [expected, expected], VERSIONS


def test_watch_train_source() -> None:
    """All train loaders of a fit, flat, before the first is set up; as often as they are loaded."""
    told: list[Any] = []

    class Two(Toy):
        def train_dataloader(self) -> Any:
            return {name: DataLoader(regression(SAMPLES), batch_size=BATCH) for name in "ab"}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    trainer = quiet_trainer(devices=1, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    undo = compat.watch_train_source(trainer, lambda loaders: told.append((loaders, compat.train_loaders(trainer))))
    trainer.fit(Two())
    undo()
    undo()  # twice does no harm
    assert [len(given) for given, _ in told] == [2, 2], VERSIONS
    assert not told[0][1] and all(isinstance(loader, DataLoader) for loader in told[0][0]), VERSIONS
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Two())
    assert len(told) == 2, VERSIONS


def stock_loader(rank: int, world: int) -> tuple[str, int, bool]:
    """The sampler and rank of the loader that Lightning makes although the strategy keeps its hands off."""
    trainer = rank_trainer(rank, world, "ddp", max_epochs=1)
    trainer.strategy.connect(Toy())
    trainer.strategy.setup_environment()
    trainer.state.stage = RunningStage.TRAINING
    compat.keep_train_sampler(trainer)
    made: Any = compat.stock_train_loader(trainer, DataLoader(regression(SAMPLES), batch_size=BATCH))
    return type(made.sampler).__name__, made.sampler.rank, made.sampler.shuffle


def test_stock_train_loader() -> None:
    expected = [(DistributedSampler.__name__, rank, True) for rank in range(2)]
    assert run_ranks(2, stock_loader) == expected, VERSIONS


def test_what_keep_train_sampler_replaces() -> None:
    connector = quiet_trainer(devices=1)._data_connector
    parameters = list(inspect.signature(type(connector)._prepare_dataloader).parameters)
    assert parameters == ["self", "dataloader", "shuffle", "mode"], VERSIONS
    assert RunningStage.TRAINING == "train", VERSIONS


class Lazy:
    """An iterator that asks about itself when it is first used, as the engine's do."""

    def __init__(self, loader: Any, answers: list[bool]) -> None:
        self.inner, self.loader, self.answers = iter(()), loader, answers
        self.begun = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.begun:
            self.begun = True
            self.answers.append(compat.is_train_iterator(self.loader.trainer, self))
            self.inner = DataLoader.__iter__(self.loader)
        return next(self.inner)


class Asking(DataLoader):
    trainer: Any = None

    def __iter__(self) -> Any:
        return Lazy(self, answers)


answers: list[bool] = []


def test_is_train_iterator() -> None:
    """The loop's iterator of each epoch, and not that of a user who looks, before or within the fit."""
    answers.clear()
    loader = Asking(regression(SAMPLES), batch_size=BATCH)
    look = LambdaCallback(
        on_train_start=lambda *_: next(iter(loader)), on_train_epoch_end=lambda *_: next(iter(loader))
    )
    loader.trainer = trainer = quiet_trainer(devices=1, callbacks=[look], max_epochs=2)
    next(iter(loader))
    trainer.fit(Toy(), loader)
    assert answers == [False, False, True, False, True, False]


def test_train_source() -> None:
    """The loader as it was given, before training starts."""
    loader, found = DataLoader(regression(16), batch_size=8), []
    note = LambdaCallback(setup=lambda trainer, module, stage: found.append(compat.train_source(trainer)))
    quiet_trainer(devices=1, max_steps=1, callbacks=[note]).fit(Toy(), loader)
    assert found == [loader]


class Ahead(IterableDataset[Any]):
    """Four batches without a length; notes how many were drawn when each was trained, and says which is the last."""

    def __init__(self, *, singly: bool, ends_at: int) -> None:
        self.singly, self.ends_at = singly, ends_at
        self.trainer: Any = None
        self.drawn, self.trained = 0, list[tuple[int, bool]]()

    def __iter__(self) -> Iterator[Any]:
        if self.singly:
            compat.fetch_singly(self.trainer)
        return self.batches()

    def batches(self) -> Iterator[Any]:
        for number in range(4):
            self.drawn += 1
            if number == self.ends_at:
                compat.last_is_fetched(self.trainer)
            yield regression(BATCH).tensors


def trained(*, singly: bool, ends_at: int = 99) -> list[tuple[int, bool]]:
    data = Ahead(singly=singly, ends_at=ends_at)

    def note(trainer: Any, *_: Any) -> None:
        data.trained.append((data.drawn, compat.last_batch_done(trainer)))

    data.trainer = quiet_trainer(devices=1, callbacks=[LambdaCallback(on_train_batch_start=note)], max_epochs=1)
    data.trainer.fit(Toy(), DataLoader(data, batch_size=None))
    return data.trained


def test_fetch_singly() -> None:
    ahead = [drawn for drawn, _ in trained(singly=False)]
    assert ahead == [2, 3, 4, 4], VERSIONS
    assert [drawn for drawn, _ in trained(singly=True)] == [1, 2, 3, 4], VERSIONS


def test_last_is_fetched() -> None:
    assert trained(singly=True, ends_at=2) == [(1, False), (2, False), (3, True)], VERSIONS
