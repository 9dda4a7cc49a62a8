"""SLURM's auto-requeue under the pipeline engine: all ranks save together, when a batch has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, rank_trainer, weights
from tests.ranks.pipeline.kit import Deep, loaders, pipeline
from tests.ranks.slurm_kit import REQUEUED, ask_to_requeue, saved_in, slurm

PLAN = {"groups": [{"ranks": [0, 1], "cuts": [0, 3, 6], "samples": 16, "micro_samples": 4}]}
AT = 2


class Asked(Deep):
    """The leader gets SLURM's signal between two micro-batches."""

    asked = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.asked and batch_idx == AT:
            self.asked = False
            ask_to_requeue()
            assert saved_in(self.trainer.default_root_dir) == []
        return super().training_step(batch, batch_idx)


class Late(Callback):
    """The other rank gets it in the next batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == AT + 1 and trainer.current_epoch == 0:
            ask_to_requeue()


class Last(Callback):
    """Rank 0 gets it behind the last batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and batch_idx == trainer.num_training_batches - 1:
            ask_to_requeue()


def fit(rank: int, world: int, folder: str, resume: str | None, *, last: bool = False) -> tuple[Any, Weights]:
    callbacks: list[Callback] = [Last()] if last else [] if resume else [Late()]
    trainer = rank_trainer(rank, world, pipeline(PLAN), max_epochs=1, default_root_dir=folder, callbacks=callbacks)
    module = Asked()
    module.asked = resume is None and not last
    with slurm(trainer) as commands:
        trainer.fit(module, *loaders(None, 16 // world), ckpt_path=resume)
    return commands, weights(module)


@pytest.mark.stock_ddp("slurm_signal", "pipeline")
def test_a_signal_within_a_step_saves_the_whole_model_when_it_has_ended(tmp_path: Path) -> None:
    (first, trained), (second, _) = run_ranks(2, fit, str(tmp_path), None)
    assert first == REQUEUED and second == []
    (path,) = saved_in(tmp_path)
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["global_step"] == AT + 1 and checkpoint["state_dict"].keys() == trained.keys()
    (_, again), _ = run_ranks(2, fit, str(tmp_path), path)
    assert again.distance(trained) <= 1e-10


def fit_to_the_last(rank: int, world: int, folder: str) -> Any:
    return fit(rank, world, folder, None, last=True)


def test_a_signal_behind_the_last_batch_is_answered(tmp_path: Path) -> None:
    (first, trained), (second, _) = run_ranks(2, fit_to_the_last, str(tmp_path))
    assert first == REQUEUED and second == []
    (path,) = saved_in(tmp_path)
    saved = Weights(torch.load(path, weights_only=False)["state_dict"])
    assert saved.distance(trained) == 0.0
