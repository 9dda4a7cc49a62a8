"""SLURM's auto-requeue under the balanced engine: all ranks save behind one batch, wherever the signal finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, weights
from tests.ranks.slurm_kit import REQUEUED, ask_to_requeue, saved_in, slurm

FIRST, SECOND = 2, 4  # batches in which rank 0 and rank 1 get the signal
BATCHES = 12


class Asked(Callback):
    """Each rank gets SLURM's signal in another batch: one within its step, the other behind it."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == FIRST:
            ask_to_requeue()
            assert saved_in(trainer.default_root_dir) == []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == SECOND:
            ask_to_requeue()


def fit(
    rank: int, world: int, folder: str, callback: type[Callback] | None, resume: str | None, window: int
) -> tuple[Any, Weights]:
    trainer = rank_trainer(
        rank, world, balanced(timeout=None), max_epochs=1, default_root_dir=folder, accumulate_grad_batches=window,
        callbacks=[] if callback is None else [callback()],
    )  # fmt: skip
    module = Toy()
    with slurm(trainer) as commands:
        trainer.fit(module, DataLoader(regression(8 * BATCHES * window), batch_size=4, shuffle=True), ckpt_path=resume)
    return commands, weights(module)


@pytest.mark.stock_ddp("slurm_signal", "balanced")
def test_all_save_behind_the_same_batch_once_rank_0_has_the_signal(tmp_path: Path) -> None:
    for window in (1, 3):
        folder = tmp_path / str(window)
        (first, trained), (second, same) = run_ranks(2, fit, str(folder), Asked, None, window, timeout_s=30.0)
        assert (first, second) == (REQUEUED, []) and same.distance(trained) == 0.0
        (path,) = saved_in(folder)
        step = torch.load(path, weights_only=False)["global_step"]
        assert FIRST <= step <= FIRST + 3
        for _, again in run_ranks(2, fit, str(folder), None, path, window):
            assert again.distance(trained) <= 1e-12
