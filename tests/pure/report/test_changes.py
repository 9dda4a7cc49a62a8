"""What changes promised and gave."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.report.changes import changes_of, shares_of
from tests.pure.report.kit import decision, run_with

SHORT = [(2, 0.1, 0.0), (1, 0.1, 0.0)]
BEFORE, AFTER = [(8, 1.0, 2.0), (8, 3.0, 0.0)], [(11, 2.0, 0.0), (5, 2.0, 0.0)]


def test_the_gain_is_of_the_first_batches_under_the_new_shares() -> None:
    """Decided in batch 4, in force from batch 6 on: 3 s before, 2 s after."""
    run = run_with([BEFORE] * 6 + [AFTER] * 5, [decision(4, (11, 5), predicted_gain=0.3)], engine="balanced")
    (change,) = changes_of(run)
    assert change.predicted_gain == 0.3 and change.realised_gain == pytest.approx(1.0 / 3.0)


def test_a_short_batch_says_nothing_of_a_change() -> None:
    steps = [BEFORE] * 6 + [AFTER, SHORT, SHORT, SHORT, AFTER, AFTER]
    (change,) = changes_of(run_with(steps, [decision(4, (11, 5))], engine="balanced"))
    assert change.realised_gain == pytest.approx(1.0 / 3.0)


def test_a_change_that_never_came_into_force_gave_nothing() -> None:
    run = run_with([BEFORE] * 8, [decision(4, (11, 5), predicted_gain=0.3)], engine="balanced")
    (change,) = changes_of(run)
    assert math.isnan(change.realised_gain)


def test_of_two_changes_each_has_its_own_gain() -> None:
    worse = [(8, 1.0, 4.0), (8, 5.0, 0.0)]
    run = run_with(
        [BEFORE] * 4 + [AFTER] * 4 + [worse] * 4, [decision(2, (11, 5)), decision(7, (8, 8))], engine="balanced"
    )
    first, second = changes_of(run)
    assert first.realised_gain == pytest.approx(1.0 / 3.0) and second.realised_gain == pytest.approx(-1.5)


def test_shares_move_or_stay() -> None:
    moved = shares_of(run_with([BEFORE] * 2 + [AFTER]))
    assert moved.moved and moved.rows == [[8, 8, 11], [8, 8, 5]] and moved.last == (11, 5)
    short = shares_of(run_with([BEFORE, SHORT, BEFORE]))
    assert not short.moved and short.steps == [0, 2] and short.last == (8, 8)
