"""The stale engine starts, trains and ends in the same way however its processes are started.

How a launcher starts Python itself is no engine's business: `tests.e2e.test_launch` has the others cold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.programs import two_at_a_time, warm_torchrun
from tests.e2e.stale.scripts import Ended, launch, launch_externally, nothing_left

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

TORCHRUN = ("--standalone", "--nproc-per-node", "2")
WAYS: dict[str, Callable[[Path], Ended]] = {
    "popen": partial(launch, cold=True, start="popen", ranks=2),
    "spawn": partial(launch, start="spawn", ranks=2),
    "fork": partial(launch, start="fork", ranks=2),
    "forkserver": partial(launch, start="forkserver", ranks=2),
    "torchrun": lambda folder: launch(folder, warm_torchrun(folder), *TORCHRUN, ranks=2),
    "by somebody else": partial(launch_externally, ranks=2),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Future[Ended]]]:
    folders = {way: tmp_path_factory.mktemp(way.replace(" ", "-")) for way in WAYS}
    ended = two_at_a_time({way: partial(start, folders[way]) for way, start in WAYS.items()})
    return {way: (folders[way], ended[way]) for way in WAYS}


@pytest.mark.stock_ddp("popen", "spawn", "stale")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_start(runs: dict[str, tuple[Path, Future[Ended]]], way: str) -> None:
    folder, run = runs[way]
    with nothing_left(folder):
        ended = run.result()
    assert set(ended.code) == {0}, ended.screens
    ended.finished(36, [0, 1])
    assert [ended.ranks[r]["world"] for r in (0, 1)] == [2, 2]
    # the trained weights come back to the process that called fit
    assert json.loads((folder / "parent0.json").read_text()) == ended.ranks[0]["weights"]
