"""Pins every private name of Lightning and torchmetrics to the installed versions; one test per function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from torchmetrics import CatMetric, MaxMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from lightning_hetero import lightning_compat as compat
from tests.ranks import test_lightning_compat_logs as logs
from tests.ranks import test_lightning_compat_steps as steps
from tests.ranks import test_lightning_compat_ticks as ticks
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, quiet_trainer, rank_trainer, regression

VERSIONS = (
    f"lightning {lightning.__version__}, torch {torch.__version__}, torchmetrics {torchmetrics.__version__}"
    " behave differently: adapt lightning_hetero/lightning_compat"
)
SAMPLES, BATCH, STEPS = 40, 10, 4


class Validated(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Ask(Callback):
    """Calls a function at every hook it names and keeps the answers."""

    def __init__(self, ask: Callable[[Any], Any], *hooks: str) -> None:
        self.answers: dict[str, list[Any]] = {hook: [] for hook in hooks}
        for hook in hooks:
            setattr(self, hook, lambda trainer, *_, hook=hook, **__: self.answers[hook].append(ask(trainer)))


def fit(*callbacks: Callback, module: Toy | None = None, **kwargs: Any) -> Any:
    trainer = quiet_trainer(devices=1, callbacks=list(callbacks), **{"max_epochs": 2, **kwargs})
    loader = DataLoader(regression(SAMPLES), batch_size=BATCH)
    trainer.fit(module or Validated(), loader, DataLoader(regression(SAMPLES), batch_size=BATCH))
    return trainer


def test_epoch_running() -> None:
    """It is the value that samplers' ``set_epoch`` gets."""

    class Noting(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    ask = Ask(compat.epoch_running, "on_train_epoch_start", "on_train_batch_end")
    data = regression(SAMPLES)
    sampler = Noting(data)
    quiet_trainer(devices=1, callbacks=[ask], max_epochs=3).fit(Toy(), DataLoader(data, BATCH, sampler=sampler))
    assert ask.answers["on_train_epoch_start"] == [0, 1, 2], VERSIONS
    assert ask.answers["on_train_batch_end"] == [e for e in range(3) for _ in range(STEPS)], VERSIONS
    assert sorted(set(sampler.epochs)) == [0, 1, 2], VERSIONS


def test_upcoming_batch() -> None:
    """When a batch is moved to the device, it is the index of this batch."""
    ask = Ask(compat.upcoming_batch, "on_train_batch_end")
    at_transfer: list[int] = []

    class Moved(Validated):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            if self.trainer.training:
                at_transfer.append(compat.upcoming_batch(self.trainer))
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    fit(ask, module=Moved())
    assert at_transfer == [0, 1, 2, 3] * 2, VERSIONS
    assert ask.answers["on_train_batch_end"] == [1, 2, 3, 4] * 2, VERSIONS


def test_batches_trained() -> None:
    ask = Ask(compat.batches_trained, "on_train_batch_start", "on_train_batch_end")
    fit(ask)
    assert ask.answers["on_train_batch_start"] == [0, 1, 2, 3] * 2, VERSIONS
    assert ask.answers["on_train_batch_end"] == [1, 2, 3, 4] * 2, VERSIONS


def test_batches_of_all_epochs() -> None:
    ask = Ask(compat.batches_of_all_epochs, "on_train_start", "on_train_batch_end", "on_train_end")
    fit(ask)
    assert ask.answers["on_train_start"] == [0] and ask.answers["on_train_end"] == [8], VERSIONS
    assert ask.answers["on_train_batch_end"] == list(range(1, 9)), VERSIONS


def test_last_batch_done() -> None:
    ask = Ask(compat.last_batch_done, "on_train_batch_end", "on_train_epoch_end")
    fit(ask)
    assert ask.answers["on_train_batch_end"] == [False, False, False, True] * 2, VERSIONS
    assert ask.answers["on_train_epoch_end"] == [True, True], VERSIONS


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


def test_count_started(tmp_path: Path) -> None:
    """A checkpoint behind a batch that was None is resumed behind it, not before."""

    class Holed(DataLoader):
        counted = True

        def __iter__(self) -> Any:
            for i, batch in enumerate(super().__iter__()):
                if i == 1 and self.counted:
                    compat.count_started(trainer)
                yield None if i == 1 else batch

    class Save(Callback):
        def __init__(self) -> None:
            self.started: list[int] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.started.append(batch_idx)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    options: dict[str, Any] = {"devices": 1, "max_epochs": 1, "limit_val_batches": 0}
    for counted, resumed in ((True, [2, 3]), (False, [1, 2, 3])):
        trainer = quiet_trainer(callbacks=[Save()], **options)
        loader = Holed(regression(SAMPLES), batch_size=BATCH)
        loader.counted = counted
        with pytest.warns(UserWarning, match="yielded None"):
            trainer.fit(Toy(), loader)
        again = Save()
        trainer = quiet_trainer(callbacks=[again], **options)
        trainer.fit(Toy(), DataLoader(regression(SAMPLES), batch_size=BATCH), ckpt_path=tmp_path / "saved.ckpt")
        assert again.started == resumed, VERSIONS


def test_trainer_callbacks() -> None:
    mine = Callback()
    trainer = quiet_trainer(devices=1, callbacks=[mine])
    found = compat.trainer_callbacks(trainer)
    assert mine in found, VERSIONS
    ask = Ask(lambda t: True, "on_train_start")
    found.append(ask)  # the list itself, not a copy: later additions are called
    trainer.fit_loop.max_epochs = 1
    trainer.fit(Toy(), DataLoader(regression(SAMPLES), batch_size=BATCH))
    assert ask.answers["on_train_start"] == [True], VERSIONS


@pytest.mark.parametrize(("batches", "expected"), [(0.0, False), (2, True), (0.5, True)])
@pytest.mark.filterwarnings("ignore:.*overfit.*")
def test_overfits(batches: float, expected: bool) -> None:
    assert compat.overfits(quiet_trainer(devices=1, overfit_batches=batches)) is expected, VERSIONS


def test_log_interval() -> None:
    assert compat.log_interval(quiet_trainer(devices=1, log_every_n_steps=7)) == 7, VERSIONS


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


def test_what_keep_train_sampler_replaces() -> None:
    connector = quiet_trainer(devices=1)._data_connector
    parameters = list(inspect.signature(type(connector)._prepare_dataloader).parameters)
    assert parameters == ["self", "dataloader", "shuffle", "mode"], VERSIONS
    assert RunningStage.TRAINING == "train", VERSIONS


def test_batch_results_open() -> None:
    hooks = {
        "on_train_epoch_start": False,
        "on_train_batch_start": True,
        "on_before_backward": True,
        "on_train_batch_end": True,
        "on_train_epoch_end": False,
        "on_validation_batch_end": False,
        "on_validation_epoch_end": False,
    }
    ask = Ask(compat.batch_results_open, *hooks)
    trainer = fit(ask, val_check_interval=2)
    assert {hook: set(found) for hook, found in ask.answers.items()} == {h: {v} for h, v in hooks.items()}, VERSIONS
    assert not compat.batch_results_open(trainer)


class Logged(Validated):
    """Logs under the guard in the batches where ``dummies`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dummy = batch_idx % 2 == 1
        value = torch.tensor(math.nan if dummy else float(batch_idx))
        wild = torch.tensor(1e6 if dummy else float(batch_idx))
        if dummy:
            with compat.dummy_batch_unlogged(self.trainer):
                self._log_all(value, wild)
            self.outside.append("update_metrics" in vars(self.trainer._results))
        else:
            self._log_all(value, wild)
        return self.loss(batch)

    def _log_all(self, value: Tensor, wild: Tensor) -> None:
        where: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("mean", value, **where)
        self.log("sized", value, batch_size=3, **where)
        self.log("sum", wild, reduce_fx="sum", **where)
        self.log("max", wild, reduce_fx="max", **where)
        self.log("min", -wild, reduce_fx="min", **where)
        self.log("count", 5, reduce_fx="sum", **where)


def test_dummy_batch_unlogged() -> None:
    """Batches 0 and 2 count, 1 and 3 do not."""
    module = Logged()
    trainer = fit(module=module, limit_val_batches=0, max_epochs=1)
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    assert found == {"mean": 1.0, "sized": 1.0, "sum": 2.0, "max": 2.0, "min": -2.0, "count": 10.0}, VERSIONS
    assert module.outside == [False, False]


def test_dummy_batch_unlogged_outside_of_a_run() -> None:
    with compat.dummy_batch_unlogged(quiet_trainer(devices=1)):
        pass


def test_what_dummy_batch_unlogged_replaces() -> None:
    ask = Ask(lambda t: t._results, "on_train_batch_start")
    fit(ask, limit_val_batches=0, max_epochs=1)
    results = ask.answers["on_train_batch_start"][0]
    parameters = list(inspect.signature(type(results).update_metrics).parameters)
    assert parameters == ["self", "key", "value", "batch_size"], VERSIONS


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.cat, self.most = SumMetric(), CatMetric(), MaxMetric()
        self.scores = MetricCollection([BinaryPrecision(), BinaryRecall()])  # one compute group, shared states

    def update(self, *values: float) -> None:
        x = torch.tensor(values)
        for metric in (self.total, self.cat, self.most):
            metric(x)
        self.scores((x > 1.5).float(), torch.ones_like(x, dtype=torch.int))

    def results(self) -> list[float]:
        scores = self.scores.compute()
        return [float(self.total.compute()), float(self.cat.compute().sum()), float(self.most.compute()), *(
            float(scores[name]) for name in ("BinaryPrecision", "BinaryRecall")
        )]


@pytest.mark.parametrize("updates", [[(1.0,), (2.0, 3.0)], [(4.0,)]], ids=["known groups", "one update"])
@pytest.mark.parametrize("dummies_at", [(1,), (0, 1), (1, 1, 2)])
def test_metrics_frozen(updates: list[tuple[float, ...]], dummies_at: tuple[int, ...]) -> None:
    """Updates inside leave no trace, wherever they come: also first, when a collection forms its groups."""
    plain, guarded = Metrics(), Metrics()
    for i in range(len(updates) + 1):
        for _ in range(dummies_at.count(i)):
            before = [m._update_count for m in guarded.modules() if isinstance(m, torchmetrics.Metric)]
            with compat.metrics_frozen(guarded):
                guarded.update(100.0, -100.0)
            after = [m._update_count for m in guarded.modules() if isinstance(m, torchmetrics.Metric)]
            assert before == after, VERSIONS
        if i < len(updates):
            plain.update(*updates[i])
            guarded.update(*updates[i])
            assert guarded.results() == plain.results(), VERSIONS
    assert guarded.results() == plain.results(), VERSIONS


def test_metrics_frozen_keeps_the_cached_result() -> None:
    metric = SumMetric()
    metric.update(3.0)
    assert float(metric.compute()) == 3.0
    with compat.metrics_frozen(metric):
        metric.update(5.0)
        assert float(metric.compute()) == 8.0
    assert float(metric.compute()) == 3.0, VERSIONS


def test_every_function_has_a_test() -> None:
    tests = {**globals(), **vars(ticks), **vars(logs), **vars(steps)}
    missing = [name for name in compat.__all__ if f"test_{name}" not in tests]
    assert missing == []
