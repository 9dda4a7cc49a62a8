"""``lightning-hetero-report``: where it finds traces, what it writes, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_hetero.cli.report import main, read_run
from tests.pure.report.kit import written

STEPS = [[(15, 1.5, 1.55), (15, 3.0, 0.05)]] * 20


@pytest.mark.parametrize("inside", ["", "events", "hetero"])
def test_a_run_is_found_where_traces_are_written(
    tmp_path: Path, inside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "run" / inside, STEPS)
    assert main([str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<title>run</title>" in page and "You waited 30.0 of 122.0 device-seconds (25 %)." in page
    trace = json.loads((tmp_path / "run" / "perfetto.json").read_text())
    assert sum(e["ph"] == "X" and e["name"] == "work" for e in trace["traceEvents"]) == 40
    assert str(tmp_path / "run" / "report.html") in capsys.readouterr().out


def test_two_runs_and_another_place_for_the_page(tmp_path: Path) -> None:
    for name in ("a", "b"):
        written(tmp_path / name / "events", STEPS)
        (tmp_path / name / "result.json").write_text(json.dumps({"fit_s": 1.0 if name == "a" else 2.0}))
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out" / "both.html")]) == 0
    page = (tmp_path / "out" / "both.html").read_text()
    assert "A: a" in page and "B: b" in page and "+100 %" in page
    assert (tmp_path / "out" / "both.perfetto.json").is_file() and not (tmp_path / "a" / "report.html").exists()


def test_a_folder_without_a_trace_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "deep" / "er", STEPS)
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no trace in" in said and "HeteroTrace()" in said and str(tmp_path / "deep" / "er") in said


def test_what_the_first_line_says_reaches_the_run(tmp_path: Path) -> None:
    written(tmp_path, STEPS)
    run, result = read_run(tmp_path)
    assert (run.engine, run.ranks, run.devices, result) == ("ddp", 2, {0: "cpu", 1: "cpu"}, {})


def test_one_of_several_runs_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("a", "b"):
        written(tmp_path, STEPS if run == "a" else STEPS[:5], run=run)
    with pytest.warns(UserWarning, match=r"holds 2 runs; this is the last, 'b'. run=ID \(--run ID\) selects another"):
        assert main([str(tmp_path)]) == 0
    assert "· 5 steps" in (tmp_path / "report.html").read_text()
    assert main([str(tmp_path), str(tmp_path), "--run", "a", "--other-run", "b"]) == 0
    assert "· 20 steps" in (tmp_path / "report.html").read_text()
    assert main([str(tmp_path), "--run", "c"]) == 2
    assert "run='c' is not in" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, STEPS)
    assert main([str(tmp_path), "-o", str(tmp_path / "rank0.jsonl" / "page.html")]) == 2
    assert "File exists" in capsys.readouterr().err
