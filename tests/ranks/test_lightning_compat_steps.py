"""Pins what is read of the loop around a single training step to the installed Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from tests.ranks.kit import Toy, quiet_trainer, regression


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


def test_unlogged() -> None:
    """Outside of a hook Lightning refuses ``self.log``; inside of this nothing is logged."""
    module = Toy()
    module.trainer = quiet_trainer(devices=1)
    with compat.unlogged(module):
        module.log("a", 1.0)
        module.log_dict({"b": 2.0})
    assert "log" not in vars(module) and not module.trainer.callback_metrics


def test_train_source() -> None:
    """The loader as it was given, before training starts."""
    loader, found = DataLoader(regression(16), batch_size=8), []
    note = LambdaCallback(setup=lambda trainer, module, stage: found.append(compat.train_source(trainer)))
    quiet_trainer(devices=1, max_steps=1, callbacks=[note]).fit(Toy(), loader)
    assert found == [loader]


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
