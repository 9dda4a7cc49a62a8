"""The benchmarks' runner: a run that was stopped goes on, committed results are not replaced while others work."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import evening, there
from benchmarks.kit import load, runner
from benchmarks.kit.figures import figure, markdown, percentile
from benchmarks.kit.minutes import MINUTES
from benchmarks.kit.runner import Benchmark, Kept
from benchmarks.provenance import ROOT

HOURS = 3  # as docs/benchmarks.md says


def test_all_benchmarks_take_what_the_page_says() -> None:
    assert sum(MINUTES.values()) <= 60 * HOURS
    assert "some three hours on two cores" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert set(there()) <= set(MINUTES)


def test_what_is_computed_is_kept_and_a_torn_line_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "kept.jsonl"
    asked: list[str] = []

    def compute(name: str) -> Any:
        asked.append(name)
        return {"found": name, "many": {1: (2, 3)}}

    for _ in range(2):
        kept = Kept(path)
        assert kept("a", lambda: compute("a")) == {"found": "a", "many": {"1": [2, 3]}}
    kept("b", lambda: compute("b"))
    assert asked == ["a", "b"]
    path.write_text(path.read_text()[:-5])  # stopped while the last line was written
    kept = Kept(path)
    assert "a" in kept and "b" not in kept
    kept("b", lambda: compute("b"))
    assert asked == ["a", "b", "b"] and "b" in Kept(path)
    kept.forget()
    assert not path.exists()


class Evening:
    """Stands for the processes: says what is run, and fails where it is told to."""

    def __init__(self, *fails: str) -> None:
        self.fails, self.ran = fails, list[str]()

    def __call__(self, command: Sequence[str]) -> int:
        self.ran.append(" ".join(command))
        return int(command[0] in self.fails)


def test_an_evening_goes_on_with_what_is_missing_and_writes_in_the_end(tmp_path: Path) -> None:
    state, names = tmp_path / "cache" / "evening.json", ["balanced", "stale", "joint"]
    first = Evening("benchmarks.stale")
    assert evening(names, quick=False, state=state, run=first, digest=str.upper) == ["stale"]
    assert first.ran == ["benchmarks.balanced", "benchmarks.stale", "benchmarks.joint"]  # no page is written
    assert json.loads(state.read_text()) == {"balanced": "BALANCED", "joint": "JOINT"}
    again = Evening()
    changed = {"balanced": "BALANCED", "stale": "STALE", "joint": "of other code"}
    assert evening(names, quick=False, state=state, run=again, digest=changed.__getitem__) == []
    assert again.ran[:2] == ["benchmarks.stale", "benchmarks.joint"]
    assert again.ran[2:] == ["benchmarks.report", "benchmarks.tables", "benchmarks.pictures"]
    assert json.loads(state.read_text()) == {}  # the next evening measures all of it anew


def test_some_names_leave_what_else_is_through_alone(tmp_path: Path) -> None:
    state = tmp_path / "evening.json"
    state.write_text(json.dumps({"stale": "STALE"}))
    assert evening(["joint"], quick=False, state=state, run=Evening(), digest=str.upper) == []
    assert json.loads(state.read_text()) == {"stale": "STALE"}


def test_a_quick_evening_keeps_nothing_and_writes_no_page(tmp_path: Path) -> None:
    state, run = tmp_path / "evening.json", Evening()
    assert evening(["faults"], quick=True, state=state, run=run, digest=str) == []
    assert run.ran == ["benchmarks.faults --quick"] and not state.exists()


# ---- one benchmark -----------------------------------------------------------------------------------------------


@pytest.fixture
def wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """A benchmark is run below an empty root; what it would write is kept."""
    found: list[tuple[Path, dict[str, Any]]] = []
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "provenance", lambda name: {"digest": "d"})
    monkeypatch.setattr(runner, "write_results", lambda folder, **what: found.append((folder, what)))
    return found


def benchmark(ran: list[str], stop: str = "") -> Benchmark:
    def run(name: str) -> Any:
        if name == stop:
            raise KeyboardInterrupt
        ran.append(name)
        return {"of": name}

    return Benchmark(
        name="mine", title="Mine", repeats=2,
        cases=lambda quick, repeats: {n: lambda n=n: run(n) for n in ("one", "two", "three")[: 1 if quick else 3]},
        report=lambda found, quick: ([figure("x", 1.0, "")], found, "notes"),
    )  # fmt: skip


def loads(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    told = iter(values)
    monkeypatch.setattr(load, "others", lambda *_: next(told))
    monkeypatch.setattr(load, "quiet", lambda: next(told))


def test_a_benchmark_that_was_stopped_goes_on(
    wrote: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads(monkeypatch, *[0.5] * 10)
    ran: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        benchmark(ran, "two").main([])
    assert ran == ["one"] and wrote == []
    benchmark(ran).main([])
    assert ran == ["one", "two", "three"]
    ((folder, what),) = wrote
    assert folder == tmp_path / "benchmarks" / "mine"
    assert what["raw"] == {name: {"of": name} for name in ran} and what["load"] == {"before": 0.5, "after": 0.5}
    benchmark(ran).main([])
    assert ran == ["one", "two", "three"] * 2  # a whole run begins anew


def test_committed_results_are_not_replaced_while_others_work(
    wrote: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    loads(monkeypatch, 0.0, 1.6)
    with pytest.raises(SystemExit, match=r"1\.6 other tasks are at work, at most 1\.5"):
        benchmark(ran).main([])
    assert ran == ["one"] and wrote == []
    loads(monkeypatch, 0.0, 0.0, 2.0)  # they came while the last case ran
    benchmark(ran).main([])
    assert [folder for folder, _ in wrote] == [tmp_path / "benchmarks" / "mine" / ".cache" / "mine"]


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "two"]])
def test_less_than_all_of_it_goes_elsewhere_whatever_others_do(
    arguments: list[str], wrote: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads(monkeypatch, *[9.0] * 9)
    ran: list[str] = []
    benchmark(ran).main(arguments)
    assert ran == [arguments[-1].replace("--quick", "one")]
    assert [folder for folder, _ in wrote] == [tmp_path / "benchmarks" / "mine" / ".cache" / "mine"]
    with pytest.raises(SystemExit, match="no case of mine has 'four'"):
        benchmark(ran).main(["--only", "four"])


def test_waiting_ends_when_it_is_quiet_or_patience_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.time, "sleep", lambda seconds: None)
    told = iter([3.0, 2.0, 1.0])
    assert load.quiet(lambda: next(told), patience_s=1e9) == 1.0
    assert load.quiet(lambda: 3.0, patience_s=0.0) == 3.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_others_are_counted_without_this_process() -> None:
    assert 0.0 <= load.others(2, lambda seconds: None) < 1000.0


# ---- figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "said", "holds"),
    [({"least": 1.0}, ">= 1", False), ({"most": 0.9}, "<= 0.9", True), ({"within": 0.1}, "0.9 to 1.1", True),
     ({"within": 0.05}, "0.95 to 1.05", False), ({}, None, None)],
)  # fmt: skip
def test_a_figure_is_held_against_its_goal(goal: dict[str, float], said: str | None, holds: bool | None) -> None:
    assert figure("a: b", 0.9, "x", **goal) == {"name": "a: b", "value": 0.9, "unit": "x", "goal": said, "holds": holds}


def test_statistics_and_a_table() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 75) == 3.0
    assert markdown(["a", "b"], [[0.12345, None], ["x", 2]]) == "| a | b |\n| --- | --- |\n| 0.123 | – |\n| x | 2 |"
