"""Pins what `lightning_compat.loaders` reads and sets: the loops' counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, SequentialSampler

from lightning_hetero import lightning_compat as compat
from tests.ranks.kit import Toy, quiet_trainer, regression
from tests.ranks.lightning_compat.kit import BATCH, SAMPLES, STEPS, VERSIONS, Ask, Each, Validated, fit, train


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


def test_behind_the_epoch() -> None:
    """`tests/ranks/test_resume_behind_the_end.py` has a run that goes on there."""
    ask = Ask(compat.behind_the_epoch, "on_train_batch_end")
    fit(ask)
    assert ask.answers["on_train_batch_end"] == [False, False, False, True] * 2, VERSIONS


def test_last_batch_done() -> None:
    ask = Ask(compat.last_batch_done, "on_train_batch_end", "on_train_epoch_end")
    fit(ask)
    assert ask.answers["on_train_batch_end"] == [False, False, False, True] * 2, VERSIONS
    assert ask.answers["on_train_epoch_end"] == [True, True], VERSIONS


def test_logging_step() -> None:
    """The step that Lightning gives the logger with the values of a batch, and of an epoch one less."""
    ask = Ask(compat.logging_step, "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
    steps: list[int | None] = []

    class Steps(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            steps.append(step)

    class Logs(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    train(Logs(), ask, log_every_n_steps=1, accumulate_grad_batches=2, max_epochs=2, logger=Steps("."))
    assert ask.answers["on_train_batch_start"] == [0, 0, 1, 1, 2, 2, 3, 3], VERSIONS
    assert ask.answers["on_train_batch_end"] == [0, 0, 1, 1, 2, 2, 3, 3], VERSIONS
    assert ask.answers["on_train_epoch_end"] == [2, 4], VERSIONS
    assert steps == [0, 1, 1, 2, 3, 3], VERSIONS


def test_is_last_prediction() -> None:
    class Asks(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.answers: list[bool] = []

        def predict_step(self, *args: Any) -> int:
            self.answers.append(compat.is_last_prediction(self.trainer))
            return 0

    module = Asks()
    quiet_trainer(devices=1).predict(module, DataLoader(regression(SAMPLES), BATCH))
    assert module.answers == [False] * (STEPS - 1) + [True], VERSIONS


def test_finds_learning_rate(tmp_path: Path) -> None:
    """Inside the finder's own fit, and not in the user's."""

    class Asks(Toy):
        answers: list[bool] = []  # noqa: RUF012

        def on_train_batch_end(self, *args: Any) -> None:
            self.answers.append(compat.finds_learning_rate(self.trainer))

    trainer = quiet_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path)
    loader = DataLoader(regression(SAMPLES), BATCH)
    Tuner(trainer).lr_find(Asks(), loader, num_training=3, early_stop_threshold=None)
    within = len(Asks.answers)
    trainer.fit(Asks(), loader)
    assert Asks.answers == [True] * within + [False] * STEPS and within, VERSIONS


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


def test_resume_from(tmp_path: Path) -> None:
    train(Toy()).save_checkpoint(tmp_path / "saved.ckpt")
    resume = LambdaCallback(setup=lambda trainer, *_, **__: compat.resume_from(trainer, str(tmp_path / "saved.ckpt")))
    each = Each(lambda trainer: trainer.current_epoch)
    trainer = train(Toy(), resume, each, max_epochs=3)
    assert each.answers == [1] * STEPS + [2] * STEPS and trainer.global_step == 3 * STEPS
    assert "resume_start" not in vars(trainer._checkpoint_connector)


@pytest.mark.parametrize("asked", [None, True, False])
def test_resume_from_loads_as_the_user_has_asked(
    tmp_path: Path, asked: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Toy()).save_checkpoint(tmp_path / "saved.ckpt")
    load, found = Strategy.load_checkpoint, []

    def load_checkpoint(self: Any, path: Any, **kwargs: Any) -> Any:
        found.append(kwargs)
        return load(self, path, **kwargs)

    monkeypatch.setattr(Strategy, "load_checkpoint", load_checkpoint)
    resume = LambdaCallback(setup=lambda trainer, *_, **__: compat.resume_from(trainer, str(tmp_path / "saved.ckpt")))
    trainer = quiet_trainer(devices=1, max_epochs=2, callbacks=[resume])
    trainer.fit(Toy(), DataLoader(regression(40), batch_size=8), weights_only=asked)
    assert found == [{"weights_only": asked}]


def test_zeroes_now() -> None:
    """True exactly in the batches before whose backward pass Lightning zeroes the gradients."""
    expected: list[bool] = []
    found: list[bool] = []
    note = LambdaCallback(
        on_train_batch_start=lambda trainer, *_: (found.append(compat.zeroes_now(trainer)), expected.append(False)),
        on_before_zero_grad=lambda *_: expected.__setitem__(-1, True),
    )
    trainer = quiet_trainer(devices=1, max_epochs=2, accumulate_grad_batches=3, callbacks=[note])
    trainer.fit(Toy(), DataLoader(regression(40), batch_size=8))  # 5 batches: the last window is short
    assert found == expected == [True, False, False, True, False] * 2


def test_write_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what `Trainer.save_checkpoint` writes; nobody is waited for."""
    written: list[dict[str, Any]] = []

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "stock.ckpt")
        with monkeypatch.context() as patch:
            patch.setattr(trainer.strategy, "barrier", lambda *_: pytest.fail("it waits"))
            compat.write_checkpoint(trainer, str(tmp_path / "ours.ckpt"))
        written[:] = [torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("stock", "ours")]

    fit(Ask(save, "on_train_epoch_end"))
    stock, ours = written
    assert stock.keys() == ours.keys(), VERSIONS
    assert {k: repr(v) for k, v in stock.items()} == {k: repr(v) for k, v in ours.items()}, VERSIONS
