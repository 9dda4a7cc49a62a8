"""Figures of two runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.record.run import run_of
from lightning_hetero.report.page.engine_views import compared, per_sample_s
from lightning_hetero.report.page.facts import RunFacts
from tests.pure.report.kit import events_of, opened, run_with

SLOW, QUICK = [[(8, 1.0, 2.0), (8, 3.0, 0.0)]] * 4, [[(11, 2.0, 0.0), (5, 2.0, 0.0)]] * 4


def test_what_a_sample_takes() -> None:
    assert per_sample_s(run_with(SLOW)) == 3.0 / 16
    assert per_sample_s(run_with(SLOW, engine="stale", unix_s=0.0)) == pytest.approx(3.0 / 16)


def test_what_is_between_steps_counts_and_what_is_between_epochs_does_not() -> None:
    """Loading takes a second more in each step; validation ten seconds after the second."""
    events = events_of(SLOW)
    late = [replace(e, t_s=e.t_s + e.step + 10.0 * (e.step > 1), epoch=int(e.step > 1)) for e in events[2:]]
    run = run_of([*events[:2], *late])
    assert run.taken_s() == [4.0, 4.0] and per_sample_s(run) == 4.0 / 16
    assert run.taken_s(run.steps[:1]) == [3.0]


def test_figures_that_one_run_has() -> None:
    results = ({"metric": {"name": "loss", "mode": "min", "value": 2.0}}, {"metric": {}})
    found = {name: rest for name, *rest in compared(RunFacts(run_with(SLOW), run_with(QUICK), results))}
    assert found["time per 1,000 samples, within epochs [s]"] == [187.5, 125.0, True]
    assert found["waiting [%]"] == [pytest.approx(100 * 8 / 24), 0.0, True]
    assert found["loss"][0] == 2.0 and found["loss"][2] is True
    assert not any(name.startswith("fit") for name in found)
    empty = run_of([opened(0, 1)])
    assert compared(RunFacts(empty, empty, ({}, {}))) == []
