"""``lightning-hetero-train`` as a user runs it: processes, directories, tables, exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from tests import warm
from tests.e2e.programs import environ, left_in, run, two_at_a_time

RANK_TABLE = "rank  samples/s"
COMPARISON = "job  strategy"
FAULT = "emulation.scenario={_target_:lightning_hetero.Scenario,faults:[{step:2,rank:%d,kind:%s}]}"

pytestmark = pytest.mark.timeout(300)


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in the current (empty) directory."""
    return run(["-m", "lightning_hetero.cli.train", *arguments], Path.cwd(), timeout_s=240.0)


@pytest.fixture(autouse=True)
def nothing_outlives_the_command(tmp_path: Path) -> Iterator[None]:
    yield
    assert left_in(tmp_path) == []


def job_directories(root: Path) -> list[str]:
    return sorted(str(p.parent.relative_to(root)) for p in root.rglob(".hydra"))


def test_one_run_leaves_one_directory_one_result_and_one_table(tmp_path: Path) -> None:
    done = train("debug=fast", "experiment=digits")
    assert done.returncode == 0, done.stderr
    (directory,) = job_directories(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]
    assert done.stdout.count(RANK_TABLE) == 1 and COMPARISON not in done.stdout
    result = json.loads((tmp_path / directory / "result.json").read_text())
    assert (result["strategy"], result["scenario"], result["steps"]) == ("ddp", "none", 4)
    assert result["samples"] == 2 * 4 * 16 and result["fit_s"] > 0 and result["samples_per_s"] > 0
    assert (
        result["metric"]["name"] == "val_acc"
        and result["metric"]["value"] == result["metrics"]["val_acc"]
    )
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert [rank["share"] for rank in result["ranks"]] == [0.5, 0.5]
    page = (tmp_path / directory / "report.html").read_text()
    assert "Ranks waited for" in page and "device-seconds" in page and "<title>stock DDP</title>" in page
    assert "val_loss at the end: " in page and f"torch {torch.__version__}" in page and "_target_: " in page
    assert "4 steps: too few to compare" in done.stdout and "4 steps: too few to compare" in page
    assert {"timeline", "spent", "scores"} <= set(re.findall(r'<section id="([\w-]+)"', page))
    assert json.loads((tmp_path / directory / "perfetto.json").read_text())["traceEvents"]
    assert f"report: {tmp_path / directory / 'report.html'}" in done.stdout
    # Lightning's advice and the other ranks are in the one log; the summary is in both places
    said = (tmp_path / directory / "train.log").read_text()
    assert "[rank 1]" in said and "Initializing distributed: GLOBAL_RANK: 1" in said and RANK_TABLE in said
    assert "Initializing distributed" not in done.stderr and "Seed set" not in done.stdout + done.stderr
    assert not [path for path in (tmp_path / directory).rglob("*") if path.is_file() and not path.stat().st_size]
    with open(tmp_path / directory / "csv" / "metrics.csv") as file:
        assert len(file.readline().split(",")) < 10


@pytest.mark.long
def test_a_multirun_repeats_nothing_and_ends_with_one_comparison(tmp_path: Path) -> None:
    swept = "strategy=ddp,hetero_balanced,hetero_stale"
    done = train(
        "--multirun", "debug=fast", swept, "hydra.sweep.dir=sweep", "callbacks.checkpoint=null"
    )
    assert done.returncode == 0, done.stderr
    assert job_directories(tmp_path) == ["sweep/0", "sweep/1", "sweep/2"]
    assert sorted(p.name for p in (tmp_path / "sweep").iterdir()) == ["0", "1", "2", "multirun.yaml"]
    assert [p.name for p in tmp_path.iterdir()] == ["sweep"]
    assert done.stdout.count(RANK_TABLE) == 3 and done.stdout.count(COMPARISON) == 1
    lines = done.stdout[done.stdout.index(COMPARISON) :].splitlines()
    names = ["ddp", "hetero_balanced", "hetero_stale"]
    assert [line.split()[:2] for line in lines[2:5]] == [[str(job), name] for job, name in enumerate(names)]
    results = [json.loads((tmp_path / "sweep" / job / "result.json").read_text()) for job in "012"]
    assert [r["overrides"][1] for r in results] == [f"strategy={name}" for name in names]
    assert [(r["steps"], r["batches"]) for r in results] == [(4, 4)] * 3
    assert [r["samples"] for r in results] == [128] * 3 and results[0]["wasted_samples"] == 0
    assert all(sum(rank["share"] for rank in r["ranks"]) == pytest.approx(1.0) for r in results)
    # Each job trained with ranks of its own, under its own configuration.
    for job, result in zip("012", results, strict=True):
        config = yaml.safe_load((tmp_path / "sweep" / job / ".hydra" / "config.yaml").read_text())
        expected = {"0": "DDPStrategy", "1": "LoadBalancedStrategy", "2": "BoundedStalenessStrategy"}[job]
        assert config["strategy"]["_target_"].rpartition(".")[2] == expected
        assert sorted(rank["rank"] for rank in result["ranks"]) == [0, 1]


@pytest.mark.long
def test_two_jobs_in_the_same_second_keep_apart_and_need_no_trace(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")
    same = "hydra.run.dir=${hetero_new_folder:same}"
    job = partial(train, "debug=fast", same, "paths.events_dir=full/events")
    done = [future.result() for future in two_at_a_time({"a": job, "b": job}).values()]
    for one in done:
        assert one.returncode == 0, one.stderr
        assert "rank0.jsonl is not written any more" in one.stderr and "ddp on none: 4 steps" in one.stdout
    for name in ("same", "same-1"):
        assert json.loads((tmp_path / name / "result.json").read_text())["steps"] == 4


def test_a_metric_that_training_did_not_log_is_validated_at_the_end(tmp_path: Path) -> None:
    done = train(
        "debug=fast", "+trainer.check_val_every_n_epoch=9", "callbacks=none", "hydra.run.dir=here"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "here" / "result.json").read_text())
    assert 0.0 <= result["metric"]["value"] <= 1.0
    assert result["ranks"] == [] and result["samples_per_s"] is None
    assert RANK_TABLE not in done.stdout and "val_acc" in done.stdout


def check_failed(done: subprocess.CompletedProcess[str], folder: Path, first: str) -> None:
    """The cause is on the screen, first and once; tracebacks are in the log."""
    assert done.returncode != 0 and RANK_TABLE not in done.stdout and not (folder / "result.json").exists()
    told = [line for line in done.stderr.splitlines() if line and "shares " not in line]
    assert re.match(first, told[0]) and told.count(told[0]) == 1, done.stderr
    assert len(told) <= 6 and "Traceback" not in done.stderr, done.stderr
    assert f"tracebacks of all ranks: {folder / 'train.log'}" in told
    assert "Traceback" in (folder / "train.log").read_text()


def test_a_failing_rank_and_ctrl_c(tmp_path: Path) -> None:
    def interrupted() -> subprocess.CompletedProcess[str]:
        (tmp_path / "screen").touch()
        with open(tmp_path / "screen", "r+") as screen:
            options = ["debug=fast", "strategy=hetero_balanced", "trainer.max_epochs=9999", "hydra.run.dir=endless"]
            command = ["-m", "lightning_hetero.cli.train", *options]
            process = warm.start(command, tmp_path, environ(), screen.fileno(), screen.fileno())
            job = psutil.Process(process.pid)
            while process.poll() is None and not list(tmp_path.glob("endless/checkpoints/*")):
                time.sleep(0.05)
            for rank in (job, *job.children(recursive=True)):  # as a terminal does
                if rank.cwd() == str(tmp_path):  # not one that waits to become a rank
                    rank.send_signal(signal.SIGINT)
            return subprocess.CompletedProcess(command, process.wait(60.0), (tmp_path / "screen").read_text())

    broken = partial(train, "debug=fast", "strategy=hetero_balanced", FAULT % (1, "exception"), "hydra.run.dir=broken")
    done = {name: job.result() for name, job in two_at_a_time({"broken": broken, "ctrl-c": interrupted}).items()}
    check_failed(done["broken"], tmp_path / "broken", "rank 1 failed: RuntimeError: scripted fault")
    assert done["ctrl-c"].returncode == 130
    assert done["ctrl-c"].stdout.splitlines()[-1] == "interrupted: all ranks have been stopped"
    assert "Traceback" not in done["ctrl-c"].stdout


@pytest.mark.long
def test_other_failing_ranks(tmp_path: Path) -> None:
    faults = {
        ("ddp", 1, "exception"): "rank 1 failed: RuntimeError: scripted fault",
        ("ddp", 1, "kill"): "local rank 1 was killed by signal 9",
        ("ddp", 0, "exception"): "rank 0 failed: RuntimeError: scripted fault",
        ("hetero_balanced", 1, "kill"): "(local rank 1 ended with code -9|rank 1 is gone without a word)",
    }
    jobs = {
        (strategy, rank, kind): partial(
            train, "debug=fast", f"strategy={strategy}", FAULT % (rank, kind), f"hydra.run.dir={strategy}-{rank}-{kind}"
        )
        for strategy, rank, kind in faults
    }
    for case, done in two_at_a_time(jobs).items():
        check_failed(done.result(), tmp_path / "-".join(map(str, case)), faults[case])


def test_a_lost_rank_does_not_fail_the_command_where_the_others_go_on(tmp_path: Path) -> None:
    done = train(
        "experiment=stale_digits", "debug=fast", "trainer.devices=3", "trainer.limit_train_batches=24",
        FAULT % (1, "kill"), "hydra.run.dir=here",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "here" / "result.json").read_text())
    assert (result["strategy"], result["steps"], result["batches"]) == ("hetero_stale", 24, 24)
    assert result["metric"]["value"] is not None
    assert {0, 2} <= {rank["rank"] for rank in result["ranks"]}
    assert re.search(r"rank 1 died.*; the others go on without, on 2 devices", done.stderr)


def test_an_unknown_option_fails_before_anything_starts(tmp_path: Path) -> None:
    done = train("strategy=no_such_strategy")
    assert done.returncode != 0
    assert "no_such_strategy" in done.stderr and "ddp" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_one_line_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "outputs").touch()
    done = train()
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"no folder can be made in .*/outputs.* \(.*\): .* hydra\.run\.dir=FOLDER.*\n", done.stderr)
