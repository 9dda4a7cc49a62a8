"""Samples that are in the model at some time, of a job whose ranks come and go."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.faults.__main__ import goodput
from benchmarks.faults.outages import BATCH, EVERY_S, RANKS, Job, System


def test_others_go_on_so_every_sample_counts(tmp_path: Path) -> None:
    job = Job(System.BALANCED, tmp_path)
    (tmp_path / "notes-0-1").write_text("1.0 8 1\n2.0 10 2\n3.5 8 3\n")
    (tmp_path / "notes-1-1").write_text("1.0 8 1\n")
    (tmp_path / "notes-1-2").write_text("3.5 8 3\n")
    assert [job.useful(at_s) for at_s in (1.0, 1.5, 3.0, 4.0)] == [0, 16, 26, 42]


def test_what_came_after_the_checkpoint_is_lost_when_all_start_again(tmp_path: Path) -> None:
    job = Job(System.DDP, tmp_path)
    (tmp_path / "notes-0-1").write_text("1.0 8 1\n2.0 8 2\n3.0 8 3\n")
    (tmp_path / "notes-0-2").write_text("9.0 8 2\n10.0 8 3\n")
    whole = RANKS * BATCH
    assert [job.useful(at_s) for at_s in (0.5, 4.0, 9.5, 11.0)] == [0, 3 * whole, 2 * whole, 3 * whole]


def test_a_rank_that_ends_by_itself_is_an_error_in_its_words(tmp_path: Path) -> None:
    job = Job(System.STALE, tmp_path)
    job.ranks[2] = subprocess.Popen(["true"])
    job.ranks[2].wait()
    job.said(2).write_text("Traceback\nRuntimeError: no more\n")
    with pytest.raises(RuntimeError, match="rank 2: RuntimeError: no more"):
        job.trains()


def test_machines_that_were_away_are_started_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, ...]] = []
    monkeypatch.setattr(Job, "start", lambda self, *ranks: started.append(ranks))
    job = Job(System.DDP, tmp_path)
    job.there_s[1] = time.monotonic() + 60.0
    job.look()
    assert not started, "all wait for the machine that is away"
    job.there_s[1] = 0.0
    job.look()
    assert started == [tuple(range(RANKS))]


def test_goodput_is_to_the_same_system_without_outages() -> None:
    found = {
        "no outage: hetero_balanced": {"samples": [2000]},
        "outages: hetero_balanced": {"samples": [1900, 1700, 1800]},
        "seeds 0 to 9": {},
    }
    values = {figure["name"].partition(": ")[2]: figure["value"] for figure in goodput(found)}
    assert values["useful samples per second without outages"] == 2000 / EVERY_S
    assert values["goodput, an outage every 20 s"] == 0.9
    assert values["goodput of the worst outage"] == 0.85
