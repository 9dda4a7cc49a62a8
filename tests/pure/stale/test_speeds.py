"""Shares by speed: equal unless others pay; computed anew only when a speed has changed by what they are rounded to."""

from __future__ import annotations

import random
from statistics import median

import pytest

from benchmarks.stale.simulator import simulate
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Bsp, Flexible, Policy
from lightning_hetero.stale.decide.speeds import Speeds

pytestmark = pytest.mark.pure


def known(*per_sample_s: float) -> Speeds:
    speeds = Speeds()
    for _ in range(20):
        for rank, seconds in enumerate(per_sample_s):
            speeds.learn(rank, 32, 32 * seconds)
    return speeds


def test_a_measurement_that_changes_nothing_computes_nothing_anew() -> None:
    speeds = known(0.01, 0.03)
    before = speeds.split([0, 1], 64)
    assert 47 <= before[0] <= 52  # speeds count in steps of 1 %, and have a fixed part
    speeds.learn(0, 32, 0.32)
    assert speeds.split([0, 1], 64) == before
    for _ in range(40):
        speeds.learn(0, 32, 0.96)
    assert 31 <= speeds.split([0, 1], 64)[0] <= 33


def test_a_rank_that_is_not_known_follows_those_that_are() -> None:
    speeds = Speeds()
    assert speeds.split([0, 1, 2], 30) == {0: 10, 1: 10, 2: 10}
    for _ in range(20):
        speeds.learn(0, 20, 0.20)
    guessed = speeds.split([0, 1, 2], 30)  # 1 and 2 are taken to be as fast as 0
    assert guessed == {0: 10, 1: 10, 2: 10}
    for _ in range(20):
        speeds.learn(1, 20, 1.00)
    mean = speeds.split([0, 1, 2], 60)  # 2 is as fast as the mean of both, 30 ms
    assert sum(mean.values()) == 60 and mean[0] > mean[2] > mean[1]


def test_one_chunk_that_took_long_is_no_reason_to_leave_equal_parts() -> None:
    speeds = Speeds()
    speeds.learn(0, 10, 0.002)
    speeds.learn(1, 10, 0.040)
    assert speeds.split([0, 1], 20) == {0: 10, 1: 10}
    speeds.learn(1, 10, 0.040)
    assert speeds.split([0, 1], 20)[1] < 5


def start(policy: Policy, seed: int) -> tuple[float, float, float]:
    """60 steps of 2 ms on two equal ranks of a machine that others use: seconds; how far the parts at the end and the
    samples are from equal, relative."""
    rng = random.Random(seed)

    def work_s(rank: int, step: int, now_s: float, samples: int) -> float:
        busy_s = rng.expovariate(1 / 0.006) if rng.random() < 0.15 else 0.0
        return 0.0002 * samples * (1.0 + 0.3 * abs(rng.gauss(0.0, 1.0))) + busy_s

    coordinator = Coordinator(policy, workers=range(2))
    run = simulate(coordinator, work_s, workers=range(2), epochs=[list(range(20, 1220, 20))])
    part = coordinator.speeds.split([0, 1], 20)[0] / 10
    samples = run.workers[0].samples / 600
    return run.makespan_s, abs(part - 1.0), abs(samples - 1.0)


def test_equal_ranks_keep_equal_parts_on_a_busy_machine() -> None:
    ours, ddp = ([start(make(), seed) for seed in range(20)] for make in (Flexible, Bsp))
    times, parts, samples = zip(*ours, strict=True)
    assert median(parts) == 0.0
    assert median(samples) < 0.06  # whoever is free takes what is missing
    assert median(times) < median(seconds for seconds, *_ in ddp)
