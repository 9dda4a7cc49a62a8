"""Pipelines: against a schedule by hand."""

from __future__ import annotations

import pytest

from lightning_hetero.record.ledger import ledger_of
from lightning_hetero.report.figures import alternatives_of, bubble, pipeline_of
from tests.pure.report.kit import pipeline_run, run_with


def test_one_micro_batch_leaves_each_of_two_stages_idle_for_half_the_time() -> None:
    """Forward, forward, backward, backward, 2 s each: each device works for 4 of 8 s."""
    run = pipeline_run((1.0, 1.0), [[(2, 4.0, 4.0), (0, 6.0, 2.0)]] * 3)
    found = pipeline_of(run, ledger_of(run))
    assert found is not None and (schedule := found.schedule(0)) is not None
    assert schedule.makespan_s == 8.0 and bubble(schedule) == pytest.approx(0.5)
    ((first, second),) = found.stages
    assert (first.planned_s, first.measured_s, first.ratio, first.idle) == (4.0, 4.0, 1.0, pytest.approx(0.5))
    assert (second.layers, second.ratio, second.idle) == ((1, 1), 1.5, pytest.approx(0.25))
    assert (found.plan.total_s, found.measured_s) == (8.0, 8.0)


def test_plain_data_parallelism_by_the_plans_model() -> None:
    """Stage 1 is half as fast: 2 + 4 + 4 + 2 = 12 s as planned, and 24 s were measured, so all counts twice."""
    run = pipeline_run((1.0, 0.5), [[(2, 4.0, 20.0), (0, 8.0, 16.0)]] * 3)
    ledger = ledger_of(run)
    found = alternatives_of(run, ledger, pipeline_of(run, ledger))
    assert found is not None and found.measured_s == 24.0
    # A sample on each device: 4 s, and 8 s on the slow one; both samples on the fast one would be no better.
    assert found.engines["ddp"] == pytest.approx(16.0) and found.engines["balanced"] == pytest.approx(16.0)
    assert found.best == ("ddp", pytest.approx(16.0))


def test_other_engines_have_no_stages() -> None:
    other = run_with([[(8, 1.0, 0.0)] * 2])
    assert pipeline_of(other, ledger_of(other)) is None
