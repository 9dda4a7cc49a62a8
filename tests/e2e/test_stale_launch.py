"""The stale engine starts, trains and ends in the same way however its processes are started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stale_kit import launch, launch_externally, nothing_left

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


@pytest.mark.parametrize("start", ["popen", "spawn", "fork", "forkserver"])
def test_every_launcher(tmp_path: Path, start: str) -> None:
    ended = launch(tmp_path, start=start, ranks=2)
    assert ended.code == [0], ended.screens
    ended.finished(36, [0, 1])
    assert [ended.ranks[r]["world"] for r in (0, 1)] == [2, 2]
    # the trained weights come back to the process that called fit
    assert json.loads((tmp_path / "parent0.json").read_text()) == ended.ranks[0]["weights"]


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = launch(tmp_path, *torchrun, ranks=2)
    assert ended.code == [0], ended.screens
    ended.finished(36, [0, 1])


def test_processes_started_by_somebody_else(tmp_path: Path) -> None:
    ended = launch_externally(tmp_path)
    assert ended.code == [0, 0, 0], ended.screens
    ended.finished(24, [0, 1, 2])
