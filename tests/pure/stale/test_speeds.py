"""Shares by speed are computed anew only when a speed has changed by what they are rounded to."""

from __future__ import annotations

import pytest

from lightning_hetero.stale.decide.speeds import Speeds

pytestmark = pytest.mark.pure


def known(*per_sample_s: float) -> Speeds:
    speeds = Speeds()
    for _ in range(20):
        for rank, seconds in enumerate(per_sample_s):
            speeds.learn(rank, 8, 8 * seconds)
    return speeds


def test_a_measurement_that_changes_nothing_computes_nothing_anew() -> None:
    speeds = known(0.01, 0.03)
    before = speeds.split([0, 1], 64)
    assert 47 <= before[0] <= 49  # speeds count in steps of 1 %
    speeds.learn(0, 8, 0.08)
    assert speeds.split([0, 1], 64) == before
    for _ in range(40):
        speeds.learn(0, 8, 0.24)
    assert 31 <= speeds.split([0, 1], 64)[0] <= 33


def test_a_rank_that_is_not_known_follows_those_that_are() -> None:
    speeds = Speeds()
    assert speeds.split([0, 1, 2], 30) == {0: 10, 1: 10, 2: 10}
    for _ in range(20):
        speeds.learn(0, 8, 0.08)
    guessed = speeds.split([0, 1, 2], 30)  # 1 and 2 are taken to be as fast as 0
    assert guessed == {0: 10, 1: 10, 2: 10}
    for _ in range(20):
        speeds.learn(1, 8, 0.40)
    mean = speeds.split([0, 1, 2], 60)  # 2 is as fast as the mean of both, 30 ms
    assert sum(mean.values()) == 60 and mean[0] > mean[2] > mean[1]
