"""Figures of a run over time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_hetero.record.run import run_of
from lightning_hetero.report.figures import last_metrics, losses_of, throughput_of
from tests.pure.report.kit import events_of, logged, run_with

SLOW = [[(8, 1.0, 2.0), (8, 3.0, 0.0)]] * 4


def test_throughput_leaves_out_what_is_between_epochs() -> None:
    """Steps of 3 s, a second of loading between two, and validation ten seconds after the second."""
    events = events_of(SLOW)
    late = [replace(e, t_s=e.t_s + e.step + 10.0 * (e.step > 1), epoch=int(e.step > 1)) for e in events[2:]]
    run = run_of([*events[:2], *late])
    assert run.taken_s() == [4.0, 4.0] and run.taken_s(run.steps[:1]) == [3.0]
    assert throughput_of(run) == [(7.0, 4.0), (25.0, 4.0)]


def test_a_long_runs_throughput_is_over_windows() -> None:
    found = throughput_of(run_with(SLOW * 100))
    assert len(found) <= 60 and all(value == pytest.approx(16.0 / 3.0) for _, value in found)


def test_losses_stand_at_the_ends_of_their_steps() -> None:
    run = run_with(SLOW, logged([{"val_loss": 2.0, "acc": 0.5}, {"val_loss": None}]))
    assert losses_of(run)["val_loss"][0] == (3.0, 2.0) and list(losses_of(run)) == ["val_loss"]
    assert math.isnan(losses_of(run)["val_loss"][1][1]) and last_metrics(run)["acc"] == 0.5


def test_one_loss_that_lightning_names_three_times_is_drawn_once() -> None:
    run = run_with(SLOW, logged([{"loss": 2.0, "loss_step": 2.0}, {"loss": 1.5, "loss_epoch": 1.5}]))
    assert losses_of(run) == {"loss_step": [(3.0, 2.0)]} and dict(last_metrics(run)) == {"loss": 1.5}
