"""Rank 0 is lost where the others depend on it: before anybody has connected, or to the server that it has started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stale.scripts import Ended, collect, free_port, nothing_left, start_rank, write_script

pytestmark = pytest.mark.timeout(200)

STEPS = 24  # 3 epochs of 96 samples in global batches of 3 * 4
LOSING = """
import os, signal, socket, time

import script
from script import ASKED, FOLDER
from lightning_hetero.stale.fit.session import Session

serve = Session.serve


def serve_and_die(*args, **kwargs):
    serve(*args, **kwargs)
    (FOLDER / "happened").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


class Cutting(script.Faults):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if ASKED["lost"] == "cut" and trainer.global_rank == 0 and (trainer.current_epoch, batch_idx) >= (1, 3):
            ASKED["lost"] = None
            (FOLDER / "happened").write_text(str(time.time()))
            trainer.strategy._connected.worker.link._connection.shutdown(socket.SHUT_RDWR)


if ASKED["lost"] == "before":
    Session.serve = serve_and_die
script.Faults = Cutting
script.main()
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


def lose(folder: Path, lost: str, **asked: Any) -> Ended:
    """Starts three ranks, each by itself."""
    write_script(folder)
    (folder / "losing.py").write_text(LOSING)
    port, outputs = free_port(), [folder / f"said{rank}" for rank in range(3)]
    processes = [
        start_rank(folder, rank, output, port=port, ranks=3, script="losing.py", lost=lost, **asked)
        for rank, output in enumerate(outputs)
    ]
    ended = collect(folder, processes, outputs, 90.0)
    assert time.time() - float((folder / "happened").read_text()) < 60.0, ended.screens
    return ended


@pytest.mark.parametrize("transport", ["auto", "pairs"])
def test_killed_before_anybody_has_connected_everybody_ends(tmp_path: Path, transport: str) -> None:
    ended = lose(tmp_path, "before", transport=transport)
    assert ended.code[0] == -9 and all(code > 0 for code in ended.code[1:]) and not ended.ranks, ended.screens
    for screen in ended.said[1:]:
        assert "lost contact with another rank" in screen, screen


@pytest.mark.long
def test_rank_0_that_loses_its_server_ends_and_the_others_go_on(tmp_path: Path) -> None:
    ended = lose(tmp_path, "cut", epochs=20, step_s=0.05)
    assert ended.code[0] > 0 and ended.code[1:] == [0, 0], ended.screens
    assert "ServerLostError" in ended.said[0], ended.said[0]
    ended.finished(20 * STEPS // 3, [1, 2])
