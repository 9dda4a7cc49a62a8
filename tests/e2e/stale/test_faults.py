"""Ranks and servers that die, stop or fail in real trainings: who goes on, who ends, and what is on the screens."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.stale.scripts import Ended, launch, launch_externally, nothing_left

pytestmark = pytest.mark.timeout(200)

STEPS = 24  # 3 epochs of 96 samples in global batches of 3 * 4
CAUSE = "the cause: a flux compensator broke"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield


def seconds_after(folder: Path, ended: Ended) -> float:
    """From the fault to the end of the last process [s]."""
    return ended.ended_at_s - float((folder / "happened").read_text())


# ---- a worker dies: the others go on --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "start"),
    [("kill", "popen"), ("kill", "fork"), ("kill while writing", "fork"), ("kill in validation", "fork")],
)
@pytest.mark.short("kill in validation-fork")
def test_the_others_go_on(tmp_path: Path, fault: str, start: str) -> None:
    batch = random.Random(start).randrange(8)
    ended = launch(tmp_path, start=start, fault=[fault, 1], at=[1, batch])
    assert (tmp_path / "happened").exists() and ended.code == [0], ended.screens
    ended.finished(STEPS, [0, 2])
    # told once, when it happens, and by one name
    assert len(re.findall(r"rank 1 died.*; the others go on without, on 2 devices", ended.screens)) == 1
    assert ended.screens.count("go on without") == 1 and "orker 1 is gone" not in ended.screens
    assert ("the metrics leave out the samples" in ended.screens) == (fault == "kill in validation")


def test_processes_started_by_somebody_else_go_on_even_without_rank_0(tmp_path: Path) -> None:
    ended = launch_externally(tmp_path, fault=["kill", 0], at=[1, 3], save=True)
    assert ended.code == [-9, 0, 0], ended.screens
    ended.finished(STEPS, [1, 2])
    assert "rank 0 died; the others go on without, on 2 devices" in ended.said[1]
    # checkpoints are still written, by the lowest rank that is left
    last = torch.load(tmp_path / "saved" / f"step={STEPS}.ckpt", weights_only=True)
    assert last["global_step"] == STEPS
    assert [w.flatten().tolist() for w in last["state_dict"].values()] == ended.ranks[1]["weights"]


def test_the_others_go_on_without_one_that_dies_on_its_way_to_the_new_group(tmp_path: Path) -> None:
    """They do not wait for it for a minute, and then end."""
    ended = launch_externally(tmp_path, ranks=4, fault=["kill", 1], at=[1, 3], falls=2, train=128)
    assert ended.code == [0, -9, -9, 0], ended.screens
    ended.finished(STEPS, [0, 3])
    assert seconds_after(tmp_path, ended) < 30.0
    for rank in (1, 2):
        assert f"rank {rank} died" in ended.said[0], ended.said[0]


@pytest.mark.parametrize("op", ["all_reduce", pytest.param("barrier", marks=pytest.mark.long)])
def test_a_death_inside_a_collective_is_survived(tmp_path: Path, op: str) -> None:
    """All have met, and one dies in what they do together; "barrier" is the one behind a checkpoint.

    With four ranks one of them waits for a survivor only, and would wait for the timeout of 100 s.
    """
    asked = {"fault": ["kill in a collective", 1], "train": 128, "op": op, "save": op == "barrier"}
    ended = launch(tmp_path, start="fork", ranks=4, **asked)
    assert (tmp_path / "happened").exists() and ended.code == [0], ended.screens
    ended.finished(STEPS, [0, 2, 3])
    assert seconds_after(tmp_path, ended) < 40.0
    assert len(re.findall(r"rank 1 died.*; the others go on without, on 3 devices", ended.screens)) == 1


# ---- a worker stops for a while -------------------------------------------------------------------------------


def test_nobody_waits_for_a_stopped_worker_and_it_comes_back(tmp_path: Path) -> None:
    ended = launch(
        tmp_path, start="fork", fault=["stop", 1], at=[0, 3], step_s=0.02, liveness_s=0.4, train=720, epochs=1
    )
    assert ended.code == [0], ended.screens
    ended.finished(60, [0, 1, 2])
    stopped, woken = (float((tmp_path / name).read_text()) for name in ("happened", "woken"))
    meanwhile = [[at for at, _ in ended.ranks[r]["batches"] if stopped + 0.5 < at < woken] for r in range(3)]
    assert len(meanwhile[0]) > 5 and len(meanwhile[2]) > 5 and not meanwhile[1]
    assert max(at for at, _ in ended.ranks[1]["batches"]) > woken


# ---- the server dies, a rank fails: everybody ends, with the cause --------------------------------------------


def test_an_exception_on_one_rank_is_on_every_screen(tmp_path: Path) -> None:
    ended = launch_externally(tmp_path, fault=["exception", 1])
    assert all(code > 0 for code in ended.code) and not ended.ranks, ended.screens
    for rank, screen in enumerate(ended.said):
        assert CAUSE in screen, screen
        assert rank == 1 or f"rank 1 failed: RuntimeError: {CAUSE}" in screen, screen
    assert seconds_after(tmp_path, ended) < 15.0


@pytest.mark.parametrize("rank", [0, 2])
def test_of_processes_started_together_the_traceback_of_the_cause_is_shown(tmp_path: Path, rank: int) -> None:
    ended = launch(tmp_path, start="fork", fault=["exception", rank])
    assert ended.code[0] > 0 and not ended.ranks, ended.screens
    assert f'raise RuntimeError("{CAUSE}")' in ended.screens  # the user's line
    assert seconds_after(tmp_path, ended) < 15.0


@pytest.mark.long
def test_a_full_disk_ends_everybody(tmp_path: Path) -> None:
    ended = launch(tmp_path, start="fork", fault=["full disk", 0], save=True)
    assert ended.code[0] > 0 and not ended.ranks, ended.screens
    assert "OSError: [Errno 28] No space left on device" in ended.screens
