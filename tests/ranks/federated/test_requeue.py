"""SLURM's auto-requeue under the federated engine: all save together, when the ranks have met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from tests.ranks.federated.kit import Plain, federated, own
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, rank_trainer, weights
from tests.ranks.slurm_kit import REQUEUED, ask_to_requeue, saved_in, slurm

BATCH, BATCHES, LOCAL_STEPS = 4, 7, 3


class Asked(Callback):
    """Rank 0 gets the signal in the first batch of the second round; the other one, in another batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == LOCAL_STEPS + trainer.global_rank:
            ask_to_requeue()
            assert saved_in(trainer.default_root_dir) == []


def fit(rank: int, world: int, folder: str, resume: str | None) -> tuple[Any, Weights]:
    callbacks = [] if resume else [Asked()]
    trainer = rank_trainer(
        rank, world, federated(local_steps=LOCAL_STEPS), max_epochs=2, default_root_dir=folder, callbacks=callbacks
    )
    module, samples = Plain(momentum=0.9), BATCH * BATCHES
    with slurm(trainer) as commands:
        trainer.fit(module, own(range(rank * samples, (rank + 1) * samples), BATCH, shuffle=True), ckpt_path=resume)
    return commands, weights(module)


def test_a_signal_within_a_round_saves_on_all_ranks_at_its_end(tmp_path: Path) -> None:
    """It was saved where each found it, which ended the job: the ranks are in different batches."""
    (first, trained), (second, _) = run_ranks(2, fit, str(tmp_path), None)
    assert first == REQUEUED and second == []
    (path,) = saved_in(tmp_path)
    assert torch.load(path, weights_only=False)["global_step"] == 2 * LOCAL_STEPS
    for _, again in run_ranks(2, fit, str(tmp_path), path):
        assert again.distance(trained) <= 1e-10
