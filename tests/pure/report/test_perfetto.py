"""The trace that Perfetto reads."""

from __future__ import annotations

import json

import pytest

from lightning_hetero.report import perfetto
from lightning_hetero.report.perfetto import perfetto_of
from lightning_hetero.types import Event
from tests.pure.report.kit import decision, run_with

STEPS = [[(8, 1.0, 1.5), (8, 2.0, 0.5)]] * 3


def test_each_rank_has_a_track_of_work_idling_and_exchange() -> None:
    queue = Event(kind="queue", rank=0, epoch=0, step=2, t_s=0.0, data={"queues": {"money": 1.5}})
    found = json.loads(json.dumps(perfetto_of(run_with(STEPS, [decision(1, (10, 6)), queue]))))
    events = found["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"rank 0 host cpu:0", "rank 1 host cpu:1"}
    slices = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert slices[:5] == [
        (0, "work", 0.0, 1e6), (0, "idle", 1e6, 1e6), (0, "exchange", 2e6, 0.5e6),
        (1, "work", 0.0, 2e6), (1, "exchange", 2e6, 0.5e6),
    ]  # fmt: skip
    assert sum(duration for rank, _, _, duration in slices if rank == 0) == 7.5e6
    assert [e["name"] for e in events if e["ph"] == "i"] == ["rebalanced"]
    assert [e["args"] for e in events if e["ph"] == "C" and "budget" in e["name"]] == [{"money": 1.5}]
    assert all(e["ts"] >= 0 for e in events if "ts" in e)


def test_of_a_long_run_the_last_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "_MOST_TURNS", 4)
    events = perfetto_of(run_with(STEPS, [decision(2, (10, 6))]))["traceEvents"]
    assert {e["args"]["step"] for e in events if e.get("name") == "work"} == {1, 2}
    assert [e["ts"] for e in events if e["ph"] == "i"] == [5e6]  # numbers of steps stay those of the run
