"""``lightning-hetero-train``: folders of its own, and results that cannot be written or read."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from lightning_hetero.cli.report import read_if_there, read_result
from lightning_hetero.cli.train import CONF, FitClock, new_folder, say
from lightning_hetero.record import read_events
from tests.full_disk import full_at


def test_jobs_that_start_at_once_make_different_folders(tmp_path: Path) -> None:
    start, made = threading.Barrier(8), list[str]()

    def job() -> None:
        start.wait()
        made.append(new_folder(str(tmp_path / "day" / "second")))

    threads = [threading.Thread(target=job) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {f"second{f'-{n}' if n else ''}" for n in range(8)}
    assert {Path(path).name for path in made} == {path.name for path in (tmp_path / "day").iterdir()} == names


@pytest.mark.parametrize("where", ["run", "sweep"])
def test_a_job_has_one_folder_and_the_next_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        same = f"hydra.{where}.dir=${{hetero_new_folder:outputs/one}}"
        jobs = [compose("train", [same], return_hydra_config=True) for _ in range(2)]
        clock = compose("train", return_hydra_config=True).hydra[where].dir
    assert [job.hydra[where].dir for job in (*jobs, *jobs)] == ["outputs/one", "outputs/one-1"] * 2
    folder, day, _ = Path(clock).parts
    assert (tmp_path / clock).is_dir() and folder == {"run": "outputs", "sweep": "multirun"}[where] and day[:2] == "20"


def test_a_result_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_result(tmp_path / "none.json") == {}
    for text in ("{", "7", "\0"):
        (tmp_path / "result.json").write_text(text)
        with pytest.warns(UserWarning, match=r"result\.json is left out, it cannot be read"):
            assert read_result(tmp_path / "result.json") == {}


def test_a_trace_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_if_there(tmp_path / "none", read_events) is None
    with pytest.warns(UserWarning, match="is left out, it cannot be read: no trace at"):
        assert read_if_there(tmp_path, read_events) is None


def test_the_clock_goes_on_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_hetero.lightning_compat.batches_of_all_epochs", lambda _: 4)
    clock, trainer = FitClock(tmp_path / "result.json"), SimpleNamespace(is_global_zero=True, global_step=4)
    module: Any = None
    clock.on_train_start(trainer, module)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"result\.json could not be written"), full_at(5):
        clock.on_train_end(trainer, module)  # type: ignore[arg-type]
    assert clock.clocked["steps"] == 4 and list(tmp_path.iterdir()) == []


def test_a_reader_who_has_gone_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        say("nobody reads this")
        say("nor this")
