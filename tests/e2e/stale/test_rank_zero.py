"""Rank 0 is lost where the others depend on it: before anybody has connected."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stale.scripts import Ended, collect, nothing_left, start_rank, write_script
from tests.ports import free_port

pytestmark = pytest.mark.timeout(200)

LOSING = """
import os, signal, time

import script
from script import FOLDER
from lightning_hetero.stale.fit.session import Session

serve = Session.serve


def serve_and_die(*args, **kwargs):
    serve(*args, **kwargs)
    (FOLDER / "happened").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


Session.serve = serve_and_die
script.main()
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


def lose(folder: Path, **asked: Any) -> Ended:
    """Starts three ranks, each by itself."""
    write_script(folder)
    (folder / "losing.py").write_text(LOSING)
    port, outputs = free_port(), [folder / f"said{rank}" for rank in range(3)]
    processes = [
        start_rank(folder, rank, output, port=port, ranks=3, script="losing.py", **asked)
        for rank, output in enumerate(outputs)
    ]
    ended = collect(folder, processes, outputs, 90.0)
    assert time.time() - float((folder / "happened").read_text()) < 60.0, ended.screens
    return ended


@pytest.mark.parametrize("transport", ["auto", "pairs"])
def test_killed_before_anybody_has_connected_everybody_ends(tmp_path: Path, transport: str) -> None:
    ended = lose(tmp_path, transport=transport)
    assert ended.code[0] == -9 and all(code > 0 for code in ended.code[1:]) and not ended.ranks, ended.screens
    for screen in ended.said[1:]:
        assert "lost contact with another rank" in screen, screen
