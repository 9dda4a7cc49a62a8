"""Whoever reaches a port of a run may write what he likes into stores: no engine reads it, none listens to others."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from tests.faults import strangers
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, weights
from tests.ranks.strangers.kit import everyone, strategy, two_stages

pytestmark = pytest.mark.ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "balanced": {"rebalance": False},
    "stale": {"policy": "bsp"},
    "federated": {"min_clients": 1, "policy": "fedavg", "local_steps": 2},
    "pipeline": {"backbone": "net", "plan": two_stages(0, 1, 3, samples=8, micro_samples=2)},
}


class Stranger(Callback):
    """Writes over every record of every store of the run in each batch, and says nothing on every port.

    Attributes:
        pids: of the ranks.
        doors: where they and their children listen.
        stores: behind the doors.
    """

    def __init__(self, pids: list[int]) -> None:
        self.pids, self.doors = pids, list[strangers.Door]()
        self.stores: list[strangers.RawStore] = []
        self._kept: list[socket.socket] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.doors:
            self.doors = strangers.doors(self.pids)
            self._kept += [door.connect() for door in self.doors]
            with ThreadPoolExecutor(len(self.doors)) as pool:
                self.stores += [store for store in pool.map(strangers.raw_store, self.doors) if store is not None]
        for store in self.stores:
            strangers.write_keys(store)

    def end(self) -> None:
        for connection in self._kept:
            connection.close()


def fitted(rank: int, world: int, engine: str, attacked: bool) -> tuple[Any, int, list[strangers.Door]]:
    """Returns weights, how many stores the last rank has written to, and where all listen."""
    torch.manual_seed(0)
    module, stranger = Toy(), Stranger(everyone(os.getpid()))
    made = strategy(engine, **{engine: {**OPTIONS[engine], "timeout": timedelta(seconds=20)}})
    data = DataLoader(regression(64), batch_size=4, shuffle=False)
    attacks = attacked and rank == world - 1
    try:
        rank_trainer(rank, world, made, max_epochs=2, callbacks=[stranger] if attacks else []).fit(module, data)
    finally:
        stranger.end()
    held = {name: p for name, p in weights(module).items() if not p.is_meta}
    return held, len(stranger.stores), stranger.doors


@pytest.mark.parametrize("engine", OPTIONS)
@pytest.mark.short("stale", "balanced")
def test_what_strangers_write_changes_nothing(engine: str) -> None:
    quiet = run_ranks(2, fitted, engine, False)
    attacked = run_ranks(2, fitted, engine, True, timeout_s=90.0)
    assert attacked[-1][1] > 0, "no store was found"
    for (own, *_), (want, *_) in zip(attacked, quiet, strict=True):
        torch.testing.assert_close(own, want, rtol=0.0, atol=1e-12)
    assert all(door.local for *_, doors in attacked for door in doors), "on one node nobody listens to others"
