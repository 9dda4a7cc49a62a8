"""``lightning-hetero-report``: where it finds traces, what it writes, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_hetero.cli.report import main, read_run, runs_in
from tests.pure.report.kit import written

STEPS = [[(15, 1.5, 1.55), (15, 3.0, 0.05)]] * 20


@pytest.mark.parametrize("inside", ["", "events", "hetero"])
def test_a_run_is_found_where_traces_are_written(
    tmp_path: Path, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "run" / inside, STEPS)
    assert main([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<title>stock DDP: run</title>" in page and "Ranks waited for 30.0 of 122.0 device-seconds (25 %)" in page
    trace = json.loads((tmp_path / "run" / "perfetto.json").read_text())
    assert sum(e["ph"] == "X" and e["name"] == "work" for e in trace["traceEvents"]) == 40
    assert str(tmp_path / "run" / "report.html") in capsys.readouterr().out


def test_several_runs_and_another_place_for_the_page(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        written(tmp_path / name / "events", STEPS)
        (tmp_path / name / "result.json").write_text(json.dumps({"fit_s": 1.0 if name == "a" else 2.0}))
    runs = [str(tmp_path / name) for name in ("a", "b", "c")]
    assert main([*runs, "-o", str(tmp_path / "out" / "all.html")]) == 0
    page = (tmp_path / "out" / "all.html").read_text()
    assert "3 runs compared: stock DDP (a), stock DDP (b), stock DDP (c)" in page
    assert "<td>1</td><td>2</td><td>2</td>" in page
    assert main(runs[:2]) == 0
    assert (tmp_path / "a" / "comparison.html").is_file() and not (tmp_path / "a" / "report.html").exists()


def test_a_multirun_is_a_comparison_of_its_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("0", "1", "10", "2"):
        written(tmp_path / name / "events", STEPS)
    (tmp_path / "failed").mkdir()
    assert [path.name for path in runs_in(tmp_path)] == ["0", "1", "2", "10"]
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<title>4 runs compared: " in page and ">0</h1>" not in page
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"


def test_a_place_that_cannot_be_written_is_named_with_another_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "run", STEPS)
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "run"), "-o", str(tmp_path / "file" / "report.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lightning-hetero-report: ") and said.endswith("Name a file in another place: -o FILE\n")


def test_empty_files_are_told_from_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.jsonl").write_text("")
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"the trace in {tmp_path} is empty" in said and "read_events" not in said


@pytest.mark.parametrize("name", [".hydra/config.yaml", "config.yaml", "hparams.yaml"])
def test_the_configuration_is_read_from_where_it_is_written(tmp_path: Path, name: str) -> None:
    written(tmp_path, STEPS)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("lr: 0.1\n")
    assert read_run(tmp_path).config == "lr: 0.1\n"


def test_a_folder_without_a_trace_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "deep" / "down" / "er", STEPS)
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no trace in" in said and "HeteroTrace()" in said and str(tmp_path / "deep" / "down" / "er") in said


def test_what_the_first_line_says_reaches_the_run(tmp_path: Path) -> None:
    written(tmp_path, STEPS)
    found = read_run(tmp_path)
    assert (found.run.engine, found.run.ranks, found.run.devices) == ("ddp", 2, {0: "cpu", 1: "cpu"})
    assert (found.result, found.config) == ({}, "")


def test_one_of_several_runs_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("a", "b"):
        written(tmp_path, STEPS if run == "a" else STEPS[:5], run=run)
    with pytest.warns(UserWarning, match=r"holds 2 runs; this is the last, 'b'. run=ID \(--run ID\) selects another"):
        assert main([str(tmp_path)]) == 0
    assert "· 5 steps" in (tmp_path / "report.html").read_text()
    assert main([str(tmp_path), str(tmp_path), "--run", "a", "--other-run", "b"]) == 0
    assert "· 20 steps" in (tmp_path / "comparison.html").read_text()
    assert main([str(tmp_path), "--run", "c"]) == 2
    assert "run='c' is not in" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, STEPS)
    assert main([str(tmp_path), "-o", str(tmp_path / "rank0.jsonl" / "page.html")]) == 2
    assert "File exists" in capsys.readouterr().err
