"""Straggler scores: speed per sample, relative to the fastest rank."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster.score import last_lines, straggler_scores
from lightning_hetero.record.ledger import Tally, ledger_of
from lightning_hetero.types import SpeedSample
from tests.pure.report.kit import Told, run_with

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


# ---- what a monitor says at the end -----------------------------------------------------------------------------


def said(*told: Told, steps: int = 20) -> str:
    return last_lines(ledger_of(run_with([told] * steps)))


def test_the_lines_people_read() -> None:
    """Ranks of 10, 10, 10 and 5 samples/s with 10 samples each: a step is the last one's 2 s, and 0.1 s of exchange.

    Balanced: 12, 11, 11 and 6 samples. Stale: 40 samples at 35 per second.
    """
    fast = (10, 1.0, 1.1)
    lines = said(fast, fast, fast, (10, 2.0, 0.1)).splitlines()
    assert lines[0] == (
        "StragglerMonitor: 36 % of your 4 ranks' time in steps was waiting for slower ranks (60.0 of 168.0"
        " device-seconds). A step took 2100.0 ms."
    )
    assert lines[1].startswith("If work grows with samples, it would take about 1300.0 ms (1.62 times as fast) with")
    assert lines[1].endswith(" with 'hetero_stale'.")
    even = said((8, 1.25, 0.25), (8, 1.25, 0.25))
    assert "1500.0 ms (not faster) with strategy='hetero_balanced'" in even
    bounds = said((8, 1.0, 99.0), (8, 100.0, 0.0))  # a quarter of the equal share stays
    assert "about 25000.0 ms" in bounds


def test_a_few_steps_are_too_few_to_compare() -> None:
    few = said((8, 1.0, 1.0), (8, 2.0, 0.0), steps=6)
    assert few.endswith("(6.0 of 24.0 device-seconds). 6 steps: too few to compare, at least 10 are needed.")


@pytest.mark.parametrize("told", [(), ((4, 1.0, 0.0),)])
def test_nothing_is_said_of_one_rank(told: tuple[Told, ...]) -> None:
    assert (said(*told) if told else last_lines(Tally(0).ledger())) == ""
    assert "would take" not in said((4, 1.0, 0.0), (0, 1.0, 0.0))  # nor of others, where a rank has not worked
