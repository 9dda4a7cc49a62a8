"""SIGTERM to one rank alone: Lightning's handler waits in a broadcast of all ranks, here nobody does."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.ranks.harness import run_ranks
from tests.ranks.kit import ENGINES, Toy, rank_trainer, regression

BATCHES = 8


class BatchReport(Callback):
    """This rank is told to go, in the middle of a batch."""

    def __init__(self, rank: int, epoch: int, batch: int) -> None:
        self.rank, self.at, self.seen = rank, (epoch, batch), 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and (trainer.current_epoch, batch_idx) == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            self.seen += 1


class Validated(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def told_to_go(
    rank: int, world: int, engine: str, target: int, at: tuple[int, int] = (0, 2), **more: Any
) -> tuple[str, int, int]:
    kind, options = ENGINES[engine]
    strategy, told = kind(process_group_backend="gloo", monitor=False, **options), BatchReport(target, *at)
    trainer = rank_trainer(rank, world, strategy, max_epochs=2, callbacks=[told], **more)
    ended = "finished"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = Validated() if more else Toy()
            validation = DataLoader(regression(4 * world), batch_size=1) if more else None
            trainer.fit(module, DataLoader(regression(world * BATCHES), batch_size=1), validation)
    except BaseException as error:
        ended = type(error).__name__
        if dist.is_initialized():
            dist.destroy_process_group()  # as the end of the process does
    return ended, told.seen, trainer.global_step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", [0, 1])
def test_a_rank_that_is_told_to_go_keeps_nobody_waiting(engine: str, target: int) -> None:
    ranks = run_ranks(2, told_to_go, engine, target, timeout_s=30.0)
    ended, seen, steps = ranks[target]
    assert (ended, seen) == ("SIGTERMException", 1) and 2 <= steps < 2 * BATCHES
    other, _, others_steps = ranks[1 - target]
    if engine == "balanced":  # by Lightning's own exception, behind the same batch
        assert (other, others_steps, steps) == ("SIGTERMException", 4, 4)
    elif (engine, target) == ("stale", 1):  # a rank that goes is no failure there
        assert (other, others_steps) == ("finished", 2 * BATCHES)
    else:
        assert other != "finished" and others_steps < 2 * BATCHES


def told_in_the_last_batch(rank: int, world: int) -> tuple[str, int, int]:
    return told_to_go(rank, world, "balanced", 1, (1, BATCHES - 1))


def told_before_validation(rank: int, world: int) -> tuple[str, int, int]:
    return told_to_go(rank, world, "balanced", 1, (0, 3), val_check_interval=4)


def test_balanced_ends_together_where_training_pauses() -> None:
    """No batch comes in which the others would hear of it, or not soon."""
    for job, steps in ((told_in_the_last_batch, 2 * BATCHES), (told_before_validation, 4)):
        ranks = run_ranks(2, job, timeout_s=30.0)
        assert [(ended, at) for ended, _, at in ranks] == [("SIGTERMException", steps)] * 2
