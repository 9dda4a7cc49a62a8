"""Pins what `lightning_compat.batches` replaces: what the loop does with one batch, and the callbacks it calls."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, quiet_trainer, rank_trainer, regression
from tests.ranks.lightning_compat.kit import BATCH, SAMPLES, STEPS, VERSIONS, Ask, Each, train
from tests.ranks.slurm_kit import REQUEUED, ask_to_requeue, saved_in, slurm


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


def test_module_attributes() -> None:
    module = Toy()
    module.own = 1  # type: ignore[attr-defined]
    train(module)
    assert set(vars(module)) - compat.module_attributes() == {"own", "lr", "seen", "_hparams"}, VERSIONS


def test_wrap_training() -> None:
    told: list[Any] = []

    class BatchReport(Toy):
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            told.append(outputs)

        def on_train_epoch_end(self) -> None:
            told.append("hook")

    for wrapped in (True, False):
        trainer = quiet_trainer(devices=1, max_epochs=1)
        undo = compat.wrap_training(trainer, lambda outputs: sorted(outputs), lambda: told.append("ended"))
        if not wrapped:
            undo()
        told.clear()
        trainer.fit(BatchReport(), DataLoader(regression(SAMPLES), batch_size=BATCH))
        *outputs, last = told
        if wrapped:
            assert outputs == [["loss"]] * STEPS + ["ended"] and last == "hook", VERSIONS
        else:
            assert [type(o) for o in outputs] == [dict] * STEPS, VERSIONS


def broadcasts(rank: int, world: int) -> list[int]:
    """Broadcasts of a fit: as it is, without that before every batch, and after the undo."""
    counts = []
    original = dist.broadcast
    for stop, undo in ((False, False), (True, False), (True, True)):
        calls: list[int] = []
        trainer = rank_trainer(rank, world, "ddp", max_epochs=1)
        if stop:
            back = compat.replace_sigterm_broadcast(trainer, lambda _: False)
            if undo:
                back()
        dist.broadcast = lambda *args, calls=calls, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
        try:
            trainer.fit(Toy(), DataLoader(regression(SAMPLES), batch_size=BATCH // world))
        finally:
            dist.broadcast = original
        counts.append(len(calls))
    return counts


def test_no_sigterm_broadcast() -> None:
    for told, stopped, undone in run_ranks(2, broadcasts):
        assert told == undone == stopped + STEPS, VERSIONS  # Lightning broadcasts before every batch


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


class Finder(LearningRateFinder):
    """Finds with the loop's empty batches passed over; notes what the ranks decide together."""

    def __init__(self, skip: bool) -> None:
        super().__init__(num_training_steps=2 * STEPS, update_attr=False, early_stop_threshold=None)
        self.skip, self.decisions = skip, 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        broadcast = trainer.strategy.broadcast

        def decided(decision: Any, src: int = 0) -> Any:
            self.decisions += isinstance(decision, bool)
            return broadcast(decision, src)

        assert not compat.finds_learning_rate(trainer), VERSIONS

        def enter() -> None:  # when the finder's own callback is in place
            assert compat.finds_learning_rate(trainer), VERSIONS
            if self.skip:
                compat.skip_empty_batches(trainer)

        trainer.strategy.broadcast = decided
        pl_module.on_train_start = enter
        super().on_fit_start(trainer, pl_module)
        del pl_module.on_train_start, trainer.strategy.broadcast


@pytest.mark.parametrize("skip", [True, False])
def test_the_finder_decides_and_notes_in_every_batch(skip: bool) -> None:
    """Lightning's callback does neither in a batch that is None; the finder reads its two lists side by side."""
    finder = Finder(skip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(Toy(), finder, loader=Holed(regression(SAMPLES), batch_size=BATCH), max_epochs=3)
    assert finder.optimal_lr is not None
    rates, losses = (len(finder.optimal_lr.results[name]) for name in ("lr", "loss"))
    empty = losses - rates
    assert (empty == 0) == skip, VERSIONS
    assert finder.decisions == (losses if skip else rates), VERSIONS


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


class Outputs(Toy):
    """Compares what the loop gives its hooks with what we make of the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
        return {"loss": loss, "x": batch[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.automatic_optimization:
            closure = compat.run_again(self.trainer, batch, batch_idx, self.trainer.optimizers[0])
            closure()
            ours = compat.outputs_of(closure)
        else:
            ours = compat.manual_outputs(self.training_step(batch, batch_idx))
        assert ours.keys() == outputs.keys() == {"loss", "x"}, VERSIONS
        assert not ours["loss"].requires_grad and ours["x"] is batch[0]
        self.seen.append([float(ours["loss"])])


def test_outputs_of() -> None:
    module = Outputs()
    train(module)
    assert len(module.seen) == STEPS


def test_manual_outputs() -> None:
    module = Outputs()
    module.automatic_optimization = False
    train(module)
    assert len(module.seen) == STEPS


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


def test_raise_sigterm() -> None:
    """As if this rank had received it, for whoever asks Lightning."""
    trainer: Any = quiet_trainer(devices=1)
    with pytest.raises(SIGTERMException):
        compat.raise_sigterm(trainer)
    assert trainer.received_sigterm, VERSIONS


def test_note_sigterm() -> None:
    """What is noted there ends a fit, in all versions; the handler that Lightning sets is looked up by this name."""
    trainer: Any = quiet_trainer(devices=1)
    connector = trainer._signal_connector
    kept = [True, False]
    undo = compat.note_sigterm(trainer, lambda: kept.pop(0))
    connector.register_signal_handlers()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not trainer.received_sigterm  # whoever keeps it says so to Lightning
        os.kill(os.getpid(), signal.SIGTERM)
        assert trainer.received_sigterm
    finally:
        connector.teardown()
    undo()
    assert connector._sigterm_notifier_fn.__func__ is type(connector)._sigterm_notifier_fn


class Asked(Toy):
    """Gets SLURM's signal in its second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            ask_to_requeue()
        return super().training_step(batch, batch_idx)


def test_requeues() -> None:
    trainer = quiet_trainer(devices=1)
    assert not compat.requeues(trainer)
    with slurm(trainer):
        assert compat.requeues(trainer), VERSIONS
        environment: Any = trainer._accelerator_connector.cluster_environment
        environment.auto_requeue = False
        assert not compat.requeues(trainer), VERSIONS


def test_defer_requeue(tmp_path: Path) -> None:
    """Lightning's handler saves and requeues when it is told to, and at once after the undo."""

    class Later(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if told and batch_idx == 2:
                assert commands == [] and saved_in(tmp_path) == []
                carry_out(told[0])

    for expected in (1, 2):
        trainer = quiet_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path, callbacks=[Later()])
        told: list[int] = []
        carry_out, undo = compat.defer_requeue(trainer, told.append)
        if expected == 2:
            undo()
            assert "_slurm_sigusr_handler_fn" not in vars(trainer._signal_connector)
        with slurm(trainer) as commands:
            trainer.fit(Asked(), DataLoader(regression(SAMPLES), batch_size=BATCH))
        assert told == ([signal.SIGUSR1] if expected == 1 else []), VERSIONS
        assert commands == REQUEUED and len(saved_in(tmp_path)) == expected, VERSIONS


class OnlyBatch(Toy):
    """Does not ask for the batch's index."""

    def training_step(self, batch: Any) -> Any:
        return self.loss(batch)


@pytest.mark.parametrize("make", [Toy, OnlyBatch])
def test_call_training_step(make: type[Toy]) -> None:
    """It gives the step what its signature asks for, within a fit."""
    module, losses = make(), []

    def call(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        with compat.unlogged(module):
            losses.append((compat.call_training_step(module, batch, batch_idx), module.loss(batch)))

    trainer = quiet_trainer(devices=1, max_steps=2, callbacks=[LambdaCallback(on_train_batch_start=call)])
    trainer.fit(module, DataLoader(regression(16), batch_size=8))
    assert len(losses) == 2 and all(torch.equal(found, expected) for found, expected in losses)
