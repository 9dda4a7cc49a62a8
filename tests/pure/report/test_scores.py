"""Seconds per item beside the others and beside oneself."""

from __future__ import annotations

from dataclasses import replace

from lightning_hetero.record.run import run_of
from lightning_hetero.report.figures import scores_of
from tests.pure.report.kit import events_of, run_with


def test_a_slow_rank_is_one_row() -> None:
    found = scores_of(run_with([[(8, 1.0, 1.0), (8, 1.0, 1.0), (8, 2.0, 0.0)]] * 48))
    assert found is not None and len(found.first) == 24 and found.first[:3] == (0, 2, 4)
    assert found.typical == [1.0, 1.0, 2.0]
    assert (found.slow_ranks, found.slow_windows, found.spells) == ([2], [], [])


def test_a_slow_time_of_all_is_columns() -> None:
    steps = [[(8, 1.0, 0.0)] * 2] * 36 + [[(8, 2.0, 0.0)] * 2] * 12
    found = scores_of(run_with(steps))
    assert found is not None
    assert (found.slow_ranks, found.slow_windows) == ([], list(range(18, 24)))
    assert found.itself[0][0] == 1.0 and found.itself[0][-1] == 2.0 and found.spells == []


def test_a_spell_of_one_rank_is_named_as_such() -> None:
    steps = [[(8, 1.0, 0.0), (8, 1.0, 0.0), (8, 3.0 if 20 <= n < 28 else 1.0, 0.0)] for n in range(48)]
    found = scores_of(run_with(steps))
    assert found is not None and (found.slow_ranks, found.spells) == ([], [2])


def test_long_batches_are_no_slow_rank() -> None:
    """Rank 1 computes on twice the items in twice the time."""
    begin = events_of([[(8, 1.0, 1.0), (8, 2.0, 0.0)]] * 30)
    told = [
        replace(e, data={**e.data, "work": 100.0 * e.data["compute_s"]}) if e.kind == "step" else e for e in begin
    ]
    found = scores_of(run_of(told))
    assert found is not None and found.typical == [1.0, 1.0]
