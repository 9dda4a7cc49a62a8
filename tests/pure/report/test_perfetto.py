"""The trace that Perfetto reads."""

from __future__ import annotations

import json

import pytest

from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report import figures
from lightning_hetero.report.figures import perfetto_of
from lightning_hetero.types import Event
from tests.pure.report.kit import RUNS, decision, opened, run_with

STEPS = [[(8, 1.0, 1.5), (8, 2.0, 0.5)]] * 3


def slices_of(run: RecordedRun) -> list[tuple[int, str, float, float]]:
    return [(e["pid"], e["name"], e["ts"], e["dur"]) for e in perfetto_of(run)["traceEvents"] if e["ph"] == "X"]


def test_each_rank_has_a_track_of_work_waiting_and_exchange() -> None:
    queue = Event(kind="queue", rank=0, epoch=0, step=2, t_s=0.0, data={"queues": {"money": 1.5}})
    found = json.loads(json.dumps(perfetto_of(run_with(STEPS, [decision(1, (10, 6)), queue]))))
    events = found["traceEvents"]
    names = [(e["pid"], e["name"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        (1, "process_name", "rank 0 host cpu:0"), (1, "thread_name", "steps"),
        (2, "process_name", "rank 1 host cpu:1"), (2, "thread_name", "steps"),
        (3, "process_name", "whole run"), (3, "thread_name", "changes"),
    ]  # fmt: skip
    assert all(e["pid"] >= 1 and e["tid"] >= 1 for e in events)
    slices = slices_of(run_with(STEPS))
    assert slices[:5] == [
        (1, "work", 0.0, 1e6), (1, "waiting", 1e6, 1e6), (1, "exchange", 2e6, 0.5e6),
        (2, "work", 0.0, 2e6), (2, "exchange", 2e6, 0.5e6),
    ]  # fmt: skip
    assert sum(duration for rank, _, _, duration in slices if rank == 1) == 7.5e6
    assert [e["name"] for e in events if e["ph"] == "i"] == ["rebalanced"]
    assert [e["args"] for e in events if e["ph"] == "C" and "budget" in e["name"]] == [{"money": 1.5}]
    assert all(e["ts"] >= 0 for e in events if "ts" in e)


def test_contributions_to_one_step_are_slices_of_their_own() -> None:
    """A worker of the stale engine computes two chunks for step 0, from 0 to 1 s and from 3 to 5 s."""
    first = {"samples": 4, "compute_s": 1.0, "wait_s": 0.0}
    again = {"samples": 8, "compute_s": 2.0, "wait_s": 0.0, "fill_in": True}
    told = [Event(kind="step", rank=0, epoch=0, step=0, t_s=t, data=d) for t, d in ((1.0, first), (5.0, again))]
    run = run_of([opened(0, 1, engine="stale"), *told])
    assert run.steps[0].turns[0].samples == 12
    begin_s = min(part.begin_s for part in run.steps[0].turns[0].parts)
    assert begin_s == 0.0
    assert slices_of(run) == [(1, "work", 0.0, 1e6), (1, "work", 3e6, 2e6)]


@pytest.mark.parametrize("name", RUNS)
def test_no_slice_begins_before_the_run_or_overlaps_another_of_its_rank(name: str) -> None:
    over: dict[int, float] = {}
    for rank, _, ts, duration in slices_of(RUNS[name]):
        assert ts >= over.get(rank, 0.0) - 1e-3 and duration > 0.0
        over[rank] = ts + duration


def test_of_a_long_run_the_last_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_MOST_TURNS", 4)
    events = perfetto_of(run_with(STEPS, [decision(2, (10, 6))]))["traceEvents"]
    assert {e["args"]["step"] for e in events if e.get("name") == "work"} == {1, 2}
    assert [e["ts"] for e in events if e["ph"] == "i"] == [5e6]  # numbers of steps stay those of the run
