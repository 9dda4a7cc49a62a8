"""Straggler scores: speed per sample, relative to the fastest rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster.score import (
    exchange_alone,
    not_working,
    other_engines_text,
    straggler_scores,
    waiting,
)
from lightning_hetero.types import SpeedSample

Measured = list[tuple[int, float]]
measured = st.lists(st.tuples(st.integers(0, 500), st.floats(1e-6, 1e3)), min_size=1, max_size=8)


def records(values: Measured) -> list[SpeedSample]:
    return [SpeedSample(rank=r, step=0, samples=n, compute_s=t) for r, (n, t) in enumerate(values)]


def test_scores_by_hand() -> None:
    assert straggler_scores(records([(10, 1.0), (10, 2.0), (5, 1.0)])) == [1.0, 0.5, 0.5]
    # A rank that got fewer samples is not taken for a fast one.
    assert straggler_scores(records([(12, 1.2), (3, 1.2)])) == pytest.approx([1.0, 0.25])


def test_what_was_not_measured_has_no_score_and_hurts_no_other() -> None:
    scores = straggler_scores(records([(4, 0.0), (4, 1.0), (4, 4.0)]))
    assert math.isnan(scores[0]) and scores[1:] == [1.0, 0.25]
    assert all(math.isnan(s) for s in straggler_scores(records([(4, 0.0), (4, 0.0)])))
    assert straggler_scores([]) == []


@given(measured)
def test_the_fastest_rank_scores_one_and_nobody_more(values: Measured) -> None:
    scores = straggler_scores(records(values))
    assert max(scores) == 1.0 and min(scores) > 0.0
    speeds = [max(1, n) / t for n, t in values]
    assert sorted(range(len(values)), key=scores.__getitem__) == sorted(
        range(len(values)), key=speeds.__getitem__
    )


def timed(*rows: tuple[float, float]) -> list[SpeedSample]:
    """From own work and waiting of each rank."""
    return [SpeedSample(rank=r, step=0, samples=8, compute_s=c, wait_s=w) for r, (c, w) in enumerate(rows)]


def test_waiting_for_the_slowest_and_time_that_is_no_work() -> None:
    """A step of 2.5 s on two ranks, of which the exchange is half a second: one waits for a second of five."""
    assert waiting(timed((1.0, 1.5), (2.0, 0.5))) == pytest.approx(0.2)
    assert waiting(timed((1.0, 0.0), (2.0, 0.0))) == pytest.approx(0.25)  # a GPU's host sees no waiting
    assert not_working(timed((1.0, 1.5), (2.0, 0.5))) == pytest.approx(0.4)
    assert math.isnan(waiting([])) and math.isnan(waiting(timed((0.0, 1.0)))) and math.isnan(not_working([]))


# ---- what other ways to train would give ------------------------------------------------------------------------


def rows(*told: tuple[int, float, float]) -> list[SpeedSample]:
    """From samples, own work and waiting of each rank."""
    return [SpeedSample(rank=r, step=0, samples=n, compute_s=c, wait_s=w) for r, (n, c, w) in enumerate(told)]


def test_the_exchange_is_what_the_last_rank_sees_of_it() -> None:
    turns = [0.1, 0.7, 0.1, 0.9, 0.1, 0.8]  # last in every second step of two ranks
    assert exchange_alone(turns, ranks=2) == 0.1
    assert exchange_alone([0.3, 0.1, 0.2, 0.4], ranks=1) == 0.3  # always last: the median
    assert exchange_alone([0.3], ranks=8) == 0.3 and exchange_alone([], ranks=8) == 0.0


def test_the_lines_people_read() -> None:
    """Ranks of 10, 10, 10 and 5 samples/s with 10 samples each: a step is the last one's 2 s, and 0.1 s of exchange.

    Balanced: 12, 11, 11 and 6 samples. Stale: 40 samples at 35 per second. Without rank 3: 13.3 samples each.
    """
    assert other_engines_text(rows((10, 1.0, 1.1), (10, 1.0, 1.1), (10, 1.0, 1.1), (10, 2.0, 0.1)), 0.1, 10) == (
        "StragglerMonitor: a step took 2100.0 ms; for slower ranks the 4 ranks waited 30.0 of 84.0 device-seconds"
        " (36 %).\n"
        "If work grows with samples, a step would take about 1300.0 ms (38 % less) with strategy='hetero_balanced',"
        " 1242.9 ms (41 % less) at best with 'hetero_stale', and 1433.3 ms (32 % less) with DDP without rank 3, the"
        " slowest."
    )
    turns = other_engines_text(rows((8, 1.25, 0.25), (8, 1.25, 0.25)), 0.0, 1)  # late by turns: nothing to shift
    assert "1500.0 ms (0 % more) with strategy='hetero_balanced', 1250.0 ms" in turns
    bounds = other_engines_text(rows((8, 1.0, 99.0), (8, 100.0, 0.0)), 0.0, 1)  # a quarter of the equal share stays
    assert "about 25000.0 ms" in bounds


@pytest.mark.parametrize(
    "told", [(), ((4, 1.0, 0.0),), ((4, 1.0, 0.0), (0, 1.0, 0.0)), ((4, 1.0, 0.0), (4, 0.0, 0.0))]
)
def test_nothing_is_said_of_what_was_not_measured(told: tuple[tuple[int, float, float], ...]) -> None:
    assert other_engines_text(rows(*told), 0.0, 1) == ""
