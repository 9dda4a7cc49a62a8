"""SLURM's auto-requeue under the stale engine: the save waits for the end of a batch, and for no other rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.stale.decide.policy import Bsp
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, rank_trainer, regression, stale, weights
from tests.ranks.slurm_kit import REQUEUED, ask_to_requeue, saved_in, slurm

BATCH, STEPS = 4, 5  # per rank, and batches of an epoch on two ranks


class Asked(Toy):
    """Gets SLURM's signal in the middle of a step; each rank in another batch."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self.where, self.at, self.saved = where, 1 + rank, []

    def on_train_start(self) -> None:
        self.beside = list(compat.trainer_callbacks(self.trainer))

    def hear(self, where: str, batch_idx: int) -> None:
        if (where, batch_idx, self.current_epoch) == (self.where, self.at, 0):
            ask_to_requeue()
            if self.global_rank == 0:  # another rank may see what rank 0 has saved behind its own step
                self.saved += saved_in(self.trainer.default_root_dir)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hear("training", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hear("validation", batch_idx)
        self.log("val", self.loss(batch), sync_dist=True)


def fit(rank: int, world: int, folder: str, where: str, resume: str | None) -> tuple[Any, int, Weights]:
    trainer = rank_trainer(rank, world, stale(policy=Bsp()), max_epochs=2, default_root_dir=folder)
    module = Asked(where, rank)
    loader = DataLoader(regression(world * BATCH * STEPS), batch_size=BATCH, shuffle=True)
    given = list(compat.trainer_callbacks(trainer))
    with slurm(trainer) as commands:
        trainer.fit(module, loader, DataLoader(regression(24), batch_size=BATCH), ckpt_path=resume)
    assert module.saved == []  # not within the step
    assert not any("requeue" in type(one).__module__ for one in module.beside)
    assert given == compat.trainer_callbacks(trainer)
    return commands, trainer.global_step, weights(module)


@pytest.mark.stock_ddp("slurm_signal", "stale")
@pytest.mark.parametrize(("where", "steps"), [("training", 2), ("validation", STEPS)])
def test_a_signal_within_a_step_saves_and_requeues_when_it_has_ended(where: str, steps: int, tmp_path: Path) -> None:
    (first, *_), (second, *_) = ended = run_ranks(2, fit, str(tmp_path), where, None)
    assert first == REQUEUED and second == []
    (path,) = saved_in(tmp_path)
    assert torch.load(path, weights_only=False)["global_step"] == steps
    resumed = run_ranks(2, fit, str(tmp_path), "", path)
    for (_, steps_done, trained), (_, steps_again, again) in zip(ended, resumed, strict=True):
        assert steps_done == steps_again == 2 * STEPS
        assert again.distance(trained) <= 1e-10
