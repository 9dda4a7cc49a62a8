"""Pins the private names behind batches that a rank skips, or trains in addition; one test per function."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_hetero import lightning_compat as compat
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, quiet_trainer, rank_trainer, regression

BATCH, STEPS = 10, 4
SAMPLES = BATCH * STEPS


def train(module: Toy, *callbacks: Callback, loader: Any = None, **kwargs: Any) -> Any:
    trainer = quiet_trainer(devices=1, callbacks=list(callbacks), **{"max_epochs": 1, **kwargs})
    trainer.fit(module, loader or DataLoader(regression(SAMPLES), batch_size=BATCH))
    return trainer


class Each(Callback):
    """Calls a function at the start, or the end, of each batch and keeps the answers."""

    def __init__(self, ask: Any, *, end: bool = False) -> None:
        self.answers: list[Any] = []
        name = "on_train_batch_end" if end else "on_train_batch_start"
        setattr(self, name, lambda trainer, *_: self.answers.append(ask(trainer)))


def test_accumulates_now() -> None:
    each = Each(compat.accumulates_now)
    train(Toy(), each, accumulate_grad_batches=3)
    assert each.answers == [True, True, False, False]  # the last batch of an epoch always steps


def test_step_limit() -> None:
    limited, free = Each(compat.step_limit), Each(compat.step_limit)
    train(Toy(), limited, max_steps=3)
    train(Toy(), free)
    assert limited.answers == [3, 2, 1] and free.answers == [None] * STEPS


def test_count_step() -> None:
    """A step made elsewhere counts: for ``global_step``, and for ``max_steps``."""
    elsewhere = Each(lambda t: compat.count_step(t) if t.global_step == 1 else None, end=True)
    trainer = train(Toy(), elsewhere, max_steps=4)
    assert trainer.global_step == 4 and len(elsewhere.answers) == 3


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


def broadcasts(rank: int, world: int) -> list[int]:
    """Broadcasts of a fit: as it is, without that before every batch, and after the undo."""
    counts = []
    original = dist.broadcast
    for stop, undo in ((False, False), (True, False), (True, True)):
        calls: list[int] = []
        trainer = rank_trainer(rank, world, "ddp", max_epochs=1)
        if stop:
            back = compat.stop_sigterm_broadcast(trainer)
            if undo:
                back()
        dist.broadcast = lambda *args, calls=calls, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
        try:
            trainer.fit(Toy(), DataLoader(regression(SAMPLES), batch_size=BATCH // world))
        finally:
            dist.broadcast = original
        counts.append(len(calls))
    return counts


def test_stop_sigterm_broadcast() -> None:
    for stock, stopped, undone in run_ranks(2, broadcasts):
        assert stock == undone == stopped + STEPS


class Holed(DataLoader):
    """Its second batch is None."""

    def __iter__(self) -> Any:
        return (None if i == 1 else batch for i, batch in enumerate(super().__iter__()))


class Ends(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[bool] = []
        self.transfers: list[bool] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append(batch is None)
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(batch is None)


class Mine(Callback):
    def __init__(self) -> None:
        self.ends: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(batch is None)


class Keeps(ModelCheckpoint):
    """A checkpoint must be asked on every rank alike, whoever has a batch."""

    asked = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.asked += 1
        super().on_train_batch_end(*args, **kwargs)


@pytest.mark.parametrize("skip", [True, False])
def test_skip_empty_batches(skip: bool, tmp_path: Path) -> None:
    module, mine, keeps, lambdas = Ends(), Mine(), Keeps(tmp_path), []
    undo: list[Any] = []
    callbacks = [
        mine, keeps, LambdaCallback(on_train_batch_end=lambda t, m, o, batch, i: lambdas.append(batch is None)),
        LambdaCallback(on_train_start=lambda t, m: undo.append(compat.skip_empty_batches(t)) if skip else None),
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(
            module, *callbacks, loader=Holed(regression(SAMPLES), batch_size=BATCH), enable_checkpointing=True,
            limit_val_batches=0,
        )  # fmt: skip
    seen = [False] * (STEPS - 1) if skip else [False, True, False, False]
    assert module.ends == module.transfers == mine.ends == lambdas == seen
    assert keeps.asked == STEPS
    assert any("yielded None" in str(w.message) for w in caught) != skip
    for back in undo:
        back()
    assert not any("on_train_batch_end" in vars(owner) for owner in (module, mine, keeps))


class Sized(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        where: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("mean", 1.0, **where)
        with compat.as_batch(self.trainer, torch.zeros(3 * BATCH, 2)):
            self.log("mean", 0.0, **where)
        self.log("mean", 1.0, **where)
        return self.loss(batch)


def test_as_batch() -> None:
    """What is logged inside counts the samples of the other batch."""
    assert float(train(Sized()).callback_metrics["mean"]) == pytest.approx(2 / 5)


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.counts: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        with compat.steps_uncounted(self.trainer):
            optimizer.step()
            self.counts.append(self.global_step)


def test_steps_uncounted() -> None:
    module = Manual()
    trainer = train(module, max_steps=3)
    assert module.counts == [2, 3, 4]  # counted inside, taken back at its end
    assert trainer.global_step == 3


class Again(Toy):
    """Trains another batch within a step, and checks its gradients."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        other = regression(7, seed=batch_idx).tensors
        optimizer: Any = self.trainer.optimizers[0]
        true = torch.autograd.grad(self.loss(other), list(self.net.parameters()))
        for factor, zero in ((1.0, True), (2.0, False), (1.0, True)):
            loss = compat.run_again(self.trainer, other, batch_idx, optimizer, zero=zero)()
            assert torch.equal(loss, self.loss(other))
            for parameter, gradient in zip(self.net.parameters(), true, strict=True):
                assert parameter.grad is not None
                assert torch.allclose(parameter.grad, factor * gradient, rtol=1e-12)
        self.seen.append([1.0])


def test_run_again() -> None:
    module = Again()
    trainer = train(module)
    assert len(module.seen) == trainer.global_step == STEPS


class Clipping(Toy):
    own = False

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.own:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        else:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def on_train_start(self) -> None:
        self.told: list[tuple[float, str]] = []
        self.norms: list[float] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def collect(value: float, kind: str, clipped: Any) -> None:
            assert clipped is self.trainer.optimizers[0]
            self.told.append((value, kind))

        with compat.collect_clipping(self.trainer, collect):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        grads = [p.grad for p in self.net.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
        assert "clip_gradients" not in vars(self.trainer.precision_plugin)


@pytest.mark.parametrize(
    ("own", "options", "told"),
    [(False, {"gradient_clip_val": 1e-3}, (1e-3, "norm")),
     (False, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, (1e-3, "value")),
     (True, {}, (0.1, "value"))],
)  # fmt: skip
def test_collect_clipping(own: bool, options: dict[str, Any], told: tuple[float, str]) -> None:
    module = Clipping()
    module.own = own
    train(module, **options)
    assert module.told == [told] * STEPS
    assert min(module.norms) > 1e-2  # nothing was clipped


class Names(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("synced", loss, sync_dist=True, on_step=False, on_epoch=True)
        if self.trainer.is_global_zero:
            self.log("zero", loss, sync_dist=True, rank_zero_only=True, on_step=False, on_epoch=True)
        self.log("own", loss, on_step=False, on_epoch=True)
        self.log("step", loss, sync_dist=True, on_step=True, on_epoch=False)
        self.metric(loss)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(regression(SAMPLES), batch_size=BATCH)

    def on_validation_epoch_end(self) -> None:
        self.validated = compat.reduced_names(self.trainer)

    def on_train_epoch_end(self) -> None:
        self.trained = compat.reduced_names(self.trainer)


def names(rank: int, world: int) -> tuple[list[str], list[str]]:
    module = Names()
    trainer = rank_trainer(rank, world, "ddp", max_epochs=1)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH))
    return module.trained, module.validated


def test_reduced_names() -> None:
    assert run_ranks(2, names) == [(["training_step.metric", "training_step.synced"], ["validation_step.val"])] * 2
    assert compat.reduced_names(quiet_trainer(devices=1)) == []


def test_resume_from(tmp_path: Path) -> None:
    train(Toy()).save_checkpoint(tmp_path / "saved.ckpt")
    resume = LambdaCallback(setup=lambda trainer, *_, **__: compat.resume_from(trainer, str(tmp_path / "saved.ckpt")))
    each = Each(lambda trainer: trainer.current_epoch)
    trainer = train(Toy(), resume, each, max_epochs=3)
    assert each.answers == [1] * STEPS + [2] * STEPS and trainer.global_step == 3 * STEPS
    assert "resume_start" not in vars(trainer._checkpoint_connector)


def test_averaged_weights() -> None:
    averaging = WeightAveraging(avg_fn=lambda old, new, n: old)
    each = Each(lambda trainer: [tuple(t.shape) for t in compat.averaged_weights(trainer)], end=True)
    module = Toy()
    train(module, averaging, each)
    shapes = [tuple(p.shape) for p in module.parameters()]
    assert each.answers == [[*shapes, ()]] * STEPS  # and the number of models averaged
    assert compat.averaged_weights(quiet_trainer(devices=1)) == []


def test_averaging_callbacks() -> None:
    """Both kinds keep a copy of the module from set-up on, `StochasticWeightAveraging` as it is."""
    callbacks = [WeightAveraging(avg_fn=lambda old, new, n: old), StochasticWeightAveraging(swa_lrs=1e-3)]
    each = Each(compat.averaging_callbacks, end=True)
    module = Toy()
    train(module, *callbacks, each)
    assert len(each.answers) == STEPS
    for found in each.answers:
        assert [callback for callback, _ in found] == callbacks
        assert all(type(copy) is Toy and copy is not module for _, copy in found)
    assert compat.averaging_callbacks(quiet_trainer(devices=1)) == []


def test_replace_sigterm_broadcast() -> None:
    """The loop calls what is put in place before every batch of several ranks, and stops if it is told to."""
    loop = quiet_trainer(devices=1).fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        return  # before Lightning 2.6 there is none
    trainer, asked = loop.trainer, []

    def told(own: bool) -> bool:
        asked.append(own)
        return own

    undo = compat.replace_sigterm_broadcast(trainer, told)
    loop._broadcast_sigterm_tensor()
    trainer._signal_connector.received_sigterm = True
    with pytest.raises(SIGTERMException):
        loop._broadcast_sigterm_tensor()
    undo()
    assert asked == [False, True] and "_broadcast_sigterm_tensor" not in vars(loop)
