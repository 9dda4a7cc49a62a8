"""Whoever reaches a port of a run may write what he likes into stores: no engine reads it, none listens to others."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from tests.faults import strangers
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, weights
from tests.ranks.strangers.kit import strategy, two_stages

pytestmark = pytest.mark.ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "balanced": {"rebalance": False},
    "stale": {"policy": "bsp"},
    "pipeline": {"backbone": "net", "plan": two_stages(0, 1, 3, samples=8, micro_samples=2)},
}


class Stranger(Callback):
    """Writes into every store of the run from its first batch to its end, and asks every port half a question.

    Attributes:
        reached: how often a store has taken everything.
        doors: where this rank and its children listen.
    """

    def __init__(self) -> None:
        self.reached, self.doors = 0, list[strangers.Door]()
        self._stores = list[strangers.RawStore]()
        self._over, self._kept = threading.Event(), list[socket.socket]()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.doors:
            self.doors = strangers.doors([os.getpid()])
            self._kept += [door.connect() for door in self.doors]
            with ThreadPoolExecutor(len(self.doors)) as pool:
                self._stores = [store for store in pool.map(strangers.raw_store, self.doors) if store is not None]
            self._thread.start()
        time.sleep(0.005)  # for the stranger's thread

    def _write(self) -> None:
        with suppress(OSError):  # the run has ended
            while not self._over.is_set():
                for store in self._stores:
                    strangers.write_keys(store)
                    self.reached += 1
                self._over.wait(0.3)

    def end(self) -> None:
        self._over.set()
        self._thread.join(20.0)
        for connection in self._kept:
            connection.close()


def fitted(rank: int, world: int, engine: str, attacked: bool) -> tuple[Any, int, list[strangers.Door]]:
    """Returns weights, how often a store was written, and where this rank has listened."""
    torch.manual_seed(0)
    module, stranger = Toy(), Stranger()
    made = strategy(engine, **{engine: {**OPTIONS[engine], "timeout": timedelta(seconds=20)}})
    data = DataLoader(regression(64), batch_size=4, shuffle=False)
    try:
        rank_trainer(rank, world, made, max_epochs=2, callbacks=[stranger] if attacked else []).fit(module, data)
    finally:
        if attacked:
            stranger.end()
    held = {name: p for name, p in weights(module).items() if not p.is_meta}
    return held, stranger.reached, stranger.doors


@pytest.mark.parametrize("engine", OPTIONS)
def test_what_strangers_write_changes_nothing(engine: str) -> None:
    quiet = run_ranks(2, fitted, engine, False)
    attacked = run_ranks(2, fitted, engine, True, timeout_s=90.0)
    assert sum(times for _, times, _ in attacked) > 0, "no store was found"
    for (own, *_), (want, *_) in zip(attacked, quiet, strict=True):
        torch.testing.assert_close(own, want, rtol=0.0, atol=1e-12)
    assert all(door.local for *_, doors in attacked for door in doors), "on one node nobody listens to others"
