"""`HeteroTrace`: which events of a fit are written, by whom, and where."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_hetero.callbacks.reporting import EventSource, Reporting
from lightning_hetero.callbacks.trace import HeteroTrace
from lightning_hetero.record import read_events
from lightning_hetero.types import Event
from tests.ranks.callbacks.kit import WARNINGS, fit


@WARNINGS
def test_stock_strategies_are_traced_with_batch_times(tmp_path: Path) -> None:
    trace = HeteroTrace(str(tmp_path / "mine"), every_n_steps=2)
    fit(tmp_path, [trace])
    run, *steps = read_events(tmp_path / "mine")
    assert (run.kind, run.data["world_size"], run.data["strategy"]) == ("run", 1, "SingleDeviceStrategy")
    assert abs(run.data["unix_s"] - time.time()) < 600 and "engine" not in run.data
    assert [(e.epoch, e.step, e.data["samples"]) for e in steps] == [
        (0, 0, 4), (0, 2, 2), (1, 0, 4), (1, 2, 2)
    ]
    assert all(e.data["step_s"] > 0 and set(e.data) == {"samples", "step_s"} for e in steps)
    fit(tmp_path, [trace])  # the same callback again continues the file
    assert [e.kind for e in read_events(tmp_path / "mine")].count("run") == 2


def _source(trainer_steps: list[int]) -> Callable[[Any], list[Event]]:
    def step_events(self: Any) -> list[Event]:
        n = len(trainer_steps)
        trainer_steps.append(n)
        kinds = ("step", "decision")
        return [Event(kind=k, rank=0, epoch=0, step=n, t_s=0.0, data={"call": n}) for k in kinds]

    return step_events


@WARNINGS
def test_what_the_strategy_measured_is_drained(tmp_path: Path) -> None:
    calls: list[int] = []
    strategy = type("Measuring", (Reporting, SingleDeviceStrategy), {"step_events": _source(calls)})("cpu")
    fit(tmp_path, [HeteroTrace(every_n_steps=2)], max_epochs=1, strategy=strategy)
    rows = [(e.kind, e.step) for e in read_events(tmp_path / "hetero")[1:]]
    assert len(calls) >= 4  # three batches, and what was left at the end
    assert [s for k, s in rows if k == "decision"] == calls
    assert [s for k, s in rows if k == "step"] == calls[::2]
    assert all(e.data.keys() <= {"call"} for e in read_events(tmp_path / "hetero")[1:])


@WARNINGS
def test_a_callback_that_measures_is_used_under_stock_strategies(tmp_path: Path) -> None:

    calls: list[int] = []
    meter = type("Meter", (Callback, EventSource), {"step_events": _source(calls)})()
    fit(tmp_path, [HeteroTrace(), meter], max_epochs=1)
    assert {e.kind for e in read_events(tmp_path / "hetero")} == {"run", "step", "decision"}
    assert all("call" in e.data for e in read_events(tmp_path / "hetero")[1:])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        HeteroTrace(every_n_steps=0)
    with pytest.raises(ValueError, match="local folder"):
        HeteroTrace("s3://bucket/run")
