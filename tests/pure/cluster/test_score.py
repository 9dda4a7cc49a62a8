"""Straggler scores: speed per sample, relative to the fastest rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster.score import imbalance, not_working, straggler_scores, waiting
from lightning_hetero.types import SpeedSample

Measured = list[tuple[int, float]]
measured = st.lists(st.tuples(st.integers(0, 500), st.floats(1e-6, 1e3)), min_size=1, max_size=8)


def records(values: Measured) -> list[SpeedSample]:
    return [SpeedSample(rank=r, step=0, samples=n, compute_s=t) for r, (n, t) in enumerate(values)]


def test_scores_by_hand() -> None:
    assert straggler_scores(records([(10, 1.0), (10, 2.0), (5, 1.0)])) == [1.0, 0.5, 0.5]


def test_a_rank_that_got_fewer_samples_is_not_taken_for_a_fast_one() -> None:
    assert straggler_scores(records([(12, 1.2), (3, 1.2)])) == pytest.approx([1.0, 0.25])


def test_a_dummy_batch_counts_as_the_one_sample_it_computes_on() -> None:
    assert straggler_scores(records([(0, 1.0), (1, 1.0)])) == [1.0, 1.0]


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


@given(measured, st.floats(1e-3, 1e3))
def test_scores_do_not_depend_on_the_unit_of_time(values: Measured, factor: float) -> None:
    scaled = [(n, t * factor) for n, t in values]
    assert straggler_scores(records(scaled)) == pytest.approx(straggler_scores(records(values)))


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=8).filter(lambda v: sum(v) > 1e-9))
def test_imbalance_is_the_slowest_over_the_mean(compute_s: list[float]) -> None:
    value = imbalance(compute_s)
    assert value == pytest.approx(max(compute_s) / (sum(compute_s) / len(compute_s)))
    assert 1.0 - 1e-12 <= value <= len(compute_s) * (1 + 1e-12)


def test_imbalance_of_nothing_measured_is_unknown() -> None:
    assert imbalance([1.0, 1.0, 2.0]) == 1.5
    assert math.isnan(imbalance([0.0, 0.0])) and math.isnan(imbalance([]))


def timed(*rows: tuple[float, float]) -> list[SpeedSample]:
    """From own work and waiting of each rank."""
    return [SpeedSample(rank=r, step=0, samples=8, compute_s=c, wait_s=w) for r, (c, w) in enumerate(rows)]


def test_waiting_for_the_slowest_and_time_that_is_no_work() -> None:
    """A step of 2.5 s on two ranks, of which the exchange is half a second: one waits for a second of five."""
    assert waiting(timed((1.0, 1.5), (2.0, 0.5))) == pytest.approx(0.2)
    assert waiting(timed((1.0, 0.0), (2.0, 0.0))) == pytest.approx(0.25)  # a GPU's host sees no waiting
    assert not_working(timed((1.0, 1.5), (2.0, 0.5))) == pytest.approx(0.4)
    assert math.isnan(waiting([])) and math.isnan(waiting(timed((0.0, 1.0)))) and math.isnan(not_working([]))
