"""The ablation's arithmetic, its closed loop on a short series, its recordings and its picture."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.ablation import contention, real, simulated
from benchmarks.ablation.__main__ import report
from benchmarks.ablation.candidates import NO_GUARD, PREDICTORS, available, default_name, named
from benchmarks.ablation.picture import PICTURE, drawn
from benchmarks.ablation.recorder import phases
from benchmarks.ablation.recordings import FIXED_S, PER_SAMPLE_S, TOTAL, from_events, recorded, recordings
from benchmarks.balanced.series import Series, closed_loop, series
from benchmarks.report import FIELDS
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import Event

DEFAULT = default_name()


def by_name(figures: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert all(set(figure) == set(FIELDS) for figure in figures)
    named = {figure["name"]: figure for figure in figures}
    assert len(named) == len(figures)
    return named


def rows(**to_ideal: list[float]) -> dict[str, dict[str, list[float]]]:
    return {name: {"to_equal": [v / 2 for v in values], "to_ideal": values} for name, values in to_ideal.items()}


# ---- candidates -------------------------------------------------------------------------------------------------


def test_the_default_is_that_of_a_policy_that_is_told_nothing() -> None:
    policy = named(DEFAULT).make()
    assert policy.settings() == BalancePolicy().settings() and policy.prototype is not named(DEFAULT).make().prototype


def test_what_a_version_lacks_is_told_by_name() -> None:
    found, missing = available()
    names = [candidate.name for candidate in found]
    assert len(set(names)) == len(names)
    for name in PREDICTORS:
        assert (name in names) != (name in missing)
    for candidate in found:
        assert isinstance(candidate.make(), BalancePolicy)
        assert candidate.offered == (not candidate.name.endswith(NO_GUARD))


# ---- simulated --------------------------------------------------------------------------------------------------


def test_the_default_is_held_against_the_best_predictor_and_equal_shares() -> None:
    """Tuning is better still, but no predictor; without the guard it is another policy."""
    each = rows(**{DEFAULT: [1.1, 1.2, 2.2], "last": [1.0, 1.0, 9.0]})
    each |= rows(**{"tuning": [0.5] * 3, f"last{NO_GUARD}": [0.4] * 3})
    found = by_name(simulated.figures({"ratios": {"swap, lag 0": each}, "missing": []}))
    ratio = found["swap, lag 0: default / best predictor"]
    assert ratio["value"] == pytest.approx(1.2) and ratio["holds"] is False
    worst = found["swap, lag 0: default / equal shares, worst seed"]
    assert worst["value"] == pytest.approx(1.1) and worst["holds"] is False
    assert found["swap, lag 0: default / equal shares"]["value"] == pytest.approx(0.6)
    assert found["swap, lag 0: best predictor (last) / ideal"]["value"] == pytest.approx(1.0)


def test_the_best_are_so_over_all_series_and_the_default_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "available", lambda: ([named(n) for n in (DEFAULT, "last", "ewma")], []))
    default = {DEFAULT: [4.0]}
    ratios = {"a": rows(last=[1.0], ewma=[2.0], **default), "b": rows(last=[3.0], ewma=[1.0], **default)}
    assert simulated.best({"ratios": ratios}) == [DEFAULT, "ewma", "last"]  # geometric means 4, 1.41, 1.73
    assert simulated.best({"ratios": ratios}, 2) == [DEFAULT, "ewma"]


def test_all_candidates_run_on_all_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "LAGS", (1,))
    raw = simulated.measure(False, seeds=1, steps=12)
    names = [candidate.name for candidate in available()[0]]
    assert all(list(each) == names for each in raw["ratios"].values())
    assert {case.rpartition(", lag")[0] for case in raw["ratios"]} > {"equal", "spells, unequal", "contention"}
    for name in names:
        assert f"| {name} |" in simulated.table(raw)




def test_free_processor_time_is_told_where_the_cause_is_seen() -> None:
    speeds = series("contention", steps=200, seed=1)
    assert speeds.free_cpu is not None
    both = [pair for rows in zip(speeds.slow, speeds.free_cpu, strict=True) for pair in zip(*rows, strict=True)]
    busy, calm = [f for k, f in both if k > 1.0], [f for k, f in both if k == 1.0]
    assert statistics.fmean(busy) == pytest.approx(1 / 3, abs=0.02) and statistics.fmean(calm) > 0.95
    assert series("spells", steps=9).free_cpu is None


def test_what_ranks_tell_reaches_the_policy() -> None:
    seen: list[float] = []

    class Heard(BalancePolicy):
        def observe(self, records: Any) -> Any:
            seen.extend(record.free_cpu for record in records)
            return super().observe(records)

    calm = [(1.0, 1.0)] * 3
    closed_loop(Heard(), Series(name="made", slow=calm, noise=calm, free_cpu=[(0.5, 0.25)] * 3), total=8)
    assert set(seen) == {0.5, 0.25}
    seen.clear()
    closed_loop(Heard(), Series(name="made", slow=calm, noise=calm), total=8)
    assert seen and all(math.isnan(value) for value in seen)


# ---- recordings -------------------------------------------------------------------------------------------------


def events() -> list[Event]:
    def event(kind: str, rank: int, step: int, **data: Any) -> Event:
        return Event(kind=kind, rank=rank, epoch=0, step=step, t_s=0.0, data=data)

    steps = [event("step", r, s, samples=32, compute_s=0.1 * (s + 1) * (r + 1)) for s in range(4) for r in range(2)]
    return [*steps, event("load", 0, 3, free_cpu=0.5), event("run", 0, 0)]


def test_a_recording_is_made_of_events_and_played_as_it_was(tmp_path: Path) -> None:
    recording = from_events(events(), warm_up=2)
    assert recording == {"samples": 32, "compute_s": [[0.3, 0.6], [0.4, 0.8]], "free_cpu": [[None, None], [0.5, None]]}
    (tmp_path / "made.json").write_text(json.dumps(recording))
    assert recordings(tmp_path) == ["made"]
    played = recorded("made", folder=tmp_path)
    cost_s = FIXED_S + PER_SAMPLE_S * TOTAL / 2  # of equal shares
    assert [[k * cost_s for k in row] for row in played.slow] == [pytest.approx([0.3, 0.6]), pytest.approx([0.4, 0.8])]
    assert played.free_cpu is not None and played.free_cpu[1][0] == 0.5 and math.isnan(played.free_cpu[0][0])
    other = recorded("made", seed=1, seeds=2, folder=tmp_path)
    assert other.slow == [played.slow[1], played.slow[0]]


@pytest.mark.parametrize("name", recordings())
def test_recordings_are_whole(name: str) -> None:
    played = recorded(name)
    assert played.steps > 100 and len({len(row) for row in played.slow}) == 1
    assert all(k > 0.0 for row in played.slow for k in row)


def test_loops_come_and_go() -> None:
    busy = phases(3, 500)
    changes = sum(a != b for a, b in pairwise(busy))
    assert not busy[0] and len(busy) == 500 and 4 <= changes <= 40 and phases(3, 500) == busy


# ---- real -------------------------------------------------------------------------------------------------------


def test_work_is_that_of_an_equal_share_and_other_seeds_are_other_spells() -> None:
    case = real.case_of("equal", 4, 30, 0.02)
    assert case.scenario.work_s(2, 5, real.PER_RANK) == pytest.approx(0.02)
    assert case.scenario.work_s(2, 5, 0) == pytest.approx(real.FIXED * 0.02)
    spells = [real.case_of("spells", 4, 3, 0.002, seed=seed).scenario for seed in (0, 1)]
    slow = [[s.speed(0, step) < 1.0 for step in range(300)] for s in spells]
    assert slow[0] != slow[1] and all(0.05 < statistics.fmean(each) < 0.6 for each in slow)
    assert real.case_of("jitter", 2, 3, 0.002).scenario.jitter == real.JITTER
    assert {ms for _, ms in real.cells(quick=False)} == {3, 10, 30} and len(real.cells(quick=True)) == 3


def runs(**whole_s: list[float]) -> dict[str, Any]:
    names = {"DDP_again": "DDP again"}
    return {"runs": {names.get(n, n): [{"whole_s": v, "steady_s": v / 10, "taken": 1.0} for v in each]
                     for n, each in whole_s.items()}}  # fmt: skip


def test_engines_are_compared_within_a_turn() -> None:
    cell = runs(DDP=[1.0, 2.0, 4.0], DDP_again=[1.0, 2.0, 4.4], kalman=[1.01, 2.1, 4.04])
    found = by_name(real.figures({"4 ranks, equal, 10 ms": cell}, "kalman"))
    whole = found["4 ranks, equal, 10 ms: kalman / DDP, whole run"]
    assert whole["value"] == pytest.approx(1.01) and whole["goal"] == "<= 1.02" and whole["holds"] is True
    assert found["4 ranks, equal, 10 ms: DDP again / DDP, steady"]["goal"] is None
    assert found["4 ranks, equal, 10 ms: DDP's step"]["value"] == pytest.approx(200.0)
    assert "| 4 ranks, equal, 10 ms | 1.000, 1.000 | 1.010, 1.010 |" in real.table({"4 ranks, equal, 10 ms": cell})


def test_steady_steps_are_told_by_their_mean_where_spells_are_meant() -> None:
    steps_s = [9.0] * 10 + [1.0, 1.0, 4.0]
    assert real.timed(real.case_of("equal", 2, 3, 0.001), steps_s) == {"whole_s": 96.0, "steady_s": 1.0}
    assert real.timed(real.case_of("spells", 2, 3, 0.001), steps_s)["steady_s"] == pytest.approx(2.0)


def test_contention_has_its_goal_for_the_default_under_a_steady_load() -> None:
    raw = {"steady": runs(DDP=[3.0, 3.0], DDP_again=[3.0, 3.0], kalman=[2.0, 1.5], narx=[1.5, 1.5])}
    found = by_name(contention.figures(raw, "kalman"))
    steady = found["steady: DDP / kalman, steady"]
    assert steady["value"] == pytest.approx(1.75) and steady["goal"] == ">= 1.7" and steady["holds"] is True
    assert found["steady: DDP / narx, steady"]["goal"] is None
    comes = contention.is_loaded("comes and goes")
    assert [comes(step) for step in (0, 39, 40, 79, 80)] == [False, False, True, True, False]
    assert contention.is_loaded("steady")(0)


# ---- the report -------------------------------------------------------------------------------------------------


def test_the_report_holds_all_parts_with_different_names() -> None:
    raw = {
        "simulated": {"ratios": {"swap, lag 0": rows(**{DEFAULT: [1.0]})}, "missing": ["no such"]},
        "real": {"2 ranks, equal, 3 ms": runs(DDP=[1.0], **{DEFAULT: [1.0]})},
        "contention": {"steady": runs(DDP=[1.0], **{DEFAULT: [1.0]})},
    }
    figures, notes = report(raw)
    by_name(figures)
    assert {figure["name"].partition(",")[0] for figure in figures} == {"simulated", "real", "contention"}
    assert "Not in this version: no such." in notes and "2 busy loops, steady" in notes


def test_every_candidate_is_a_dot_in_the_picture() -> None:
    names = (DEFAULT, f"{DEFAULT}{NO_GUARD}", "tuning")
    every = [f"{case}, lag {lag}" for case in ("a", "spells, b") for lag in (0, 4)]
    cases = {case: rows(**{name: [1.0] for name in names}) for case in every}
    picture = ElementTree.fromstring(drawn({"ratios": cases, "missing": []}))
    dots = [e for e in picture.iter() if e.tag.endswith("circle")]
    assert len(dots) == 3 + 4 * len(names)  # the legend has a dot for hollow ones, too
    half = [e for e in dots[3:] if e.get("fill") == "white"]
    assert len(half) == 4


def test_the_picture_is_that_of_the_results() -> None:
    results = PICTURE.parents[2] / "benchmarks" / "ablation" / "results.json"
    assert results.exists() == PICTURE.exists()
    if results.exists():
        raw = json.loads(results.read_text())["raw"]["simulated"]
        assert PICTURE.read_text() == drawn(raw), "run: python -m benchmarks.ablation.picture"
