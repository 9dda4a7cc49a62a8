"""The server's process among the ranks' lives: killed at any moment, two fits in a row, workers alive at its fork."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hetero.transport.base import ServerLostError
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, rank_trainer, regression, single, stale, weights

pytestmark = pytest.mark.ranks
EXACT = 1e-12
SAMPLES, BATCH, EPOCHS = 96, 24, 2


def loader(per_device: int = BATCH // 2, **options: Any) -> DataLoader:
    return DataLoader(regression(SAMPLES), batch_size=per_device, shuffle=True, **options)


def valid(**options: Any) -> DataLoader:
    return DataLoader(regression(40, seed=4), batch_size=4, **options)


def servers() -> list[psutil.Process]:
    """Children that lead a session, which a rank's server does."""
    return [child for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]


# ---- the server is killed -------------------------------------------------------------------------------------


class Validated(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Killer(Callback):
    """Rank 0 kills the server while all ranks are in the middle of something."""

    def __init__(self, where: str) -> None:
        self.where = where

    def kill(self, trainer: Any) -> None:
        if trainer.global_rank == 0 and trainer.current_epoch == 1 and not Path("killed").exists():
            (server,) = servers()
            Path("killed").write_text(str(time.monotonic()))  # before: the others may notice at once
            server.kill()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.where == "step":  # between the forward and the backward pass
            self.kill(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "meeting" and batch_idx == SAMPLES // BATCH - 1 and trainer.global_rank == 0:
            time.sleep(0.05)  # the others have come to the meeting meanwhile, in all likelihood
            self.kill(trainer)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.where == "validation":
            self.kill(trainer)


def killing_job(rank: int, world: int, where: str, transport: Any) -> tuple[str, float]:
    strategy = stale(policy="bsp", transport=transport)
    trainer = rank_trainer(rank, world, strategy, callbacks=[Killer(where)], max_epochs=4)
    with pytest.raises(ServerLostError) as caught:
        trainer.fit(Validated(), loader(BATCH // world), valid())
    ended_s = time.monotonic()
    assert not servers()
    return str(caught.value), ended_s - float(Path("killed").read_text())


@pytest.mark.parametrize("where", ["step", "meeting", "validation"])
@pytest.mark.parametrize("transport", ["auto", "pairs"])
def test_a_killed_server_ends_every_rank_with_the_cause(where: str, transport: str) -> None:
    for text, after_s in run_ranks(3, killing_job, where, transport):
        assert "parameter server" in text
        assert after_s < 15.0


# ---- one process, several fits --------------------------------------------------------------------------------


def several_job(rank: int, world: int) -> tuple[list[Weights], list[int]]:
    """Twice a new model, Trainer and strategy; then the last Trainer goes on for another epoch, with new optimizers."""
    module, trainer = Toy(), None
    ended, steps = [], []
    for _ in range(2):
        module = Toy()
        trainer = rank_trainer(rank, world, stale(policy="bsp"), max_epochs=EPOCHS)
        trainer.fit(module, loader(BATCH // world))
        assert not servers()
        ended.append(weights(module))
        steps.append(trainer.global_step)
    assert trainer is not None
    trainer.fit_loop.max_epochs = EPOCHS + 1
    trainer.fit(module, loader(BATCH // world))
    assert not servers()
    return [*ended, weights(module)], [*steps, trainer.global_step]


def test_fits_in_a_row_are_as_good_as_the_first() -> None:
    module = Toy()
    per_epoch = single(module, regression(SAMPLES), BATCH, max_epochs=EPOCHS).global_step // EPOCHS
    expected = weights(module)
    ranks = run_ranks(2, several_job)
    for ended, steps in ranks:
        assert ended[0].distance(expected) <= EXACT and ended[1].distance(expected) <= EXACT
        assert ended[2].distance(expected) > 1e-4 and ended[2].distance(ranks[0][0][2]) == 0.0
        assert steps == [EPOCHS * per_epoch, EPOCHS * per_epoch, (EPOCHS + 1) * per_epoch]


# ---- workers of DataLoaders -----------------------------------------------------------------------------------


def workers_job(rank: int, world: int) -> tuple[Weights, int]:
    """The user's own loader has workers when the server is forked; those of the fit come after it, and stay."""
    workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
    own = iter(DataLoader(regression(6), batch_size=1, **workers))
    next(own)
    before = psutil.Process().children()
    assert len(before) == 2
    module = Validated()
    trainer = rank_trainer(rank, world, stale(policy="bsp"), max_epochs=EPOCHS)
    trainer.fit(module, loader(BATCH // world, **workers), valid(**workers))
    assert all(worker.is_running() for worker in before) and not servers()
    assert sum(1 for _ in own) == 5  # unharmed
    return weights(module), trainer.global_step


def test_workers_that_live_when_the_server_is_forked_do_no_harm() -> None:
    module = Toy()
    oracle = single(module, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    for result, step in run_ranks(2, workers_job):
        assert result.distance(weights(module)) <= EXACT
        assert step == oracle.global_step
