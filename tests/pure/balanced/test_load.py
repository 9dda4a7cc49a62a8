"""Loads on their way from the ranks' rows to a predictor that wants them."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.balanced.decide.controller import Row, ShareController
from lightning_hetero.predictors import Kalman, Narx
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import SpeedSample

PER_SAMPLE_S = 0.003


class Listening(Kalman):
    """Notes what it is told, and when."""

    WANTS_LOAD = True

    def fresh(self) -> Listening:
        new = super().fresh()
        new.heard = []
        return new

    heard: list[tuple[float, float] | str]

    def told(self, *, free_cpu: float, free_mem: float) -> None:
        self.heard.append((free_cpu, free_mem))

    def update(self, samples: int, compute_s: float) -> None:
        self.heard.append("time")
        super().update(samples, compute_s)


def record(rank: int, free_cpu: float, compute_s: float = 0.1) -> SpeedSample:
    return SpeedSample(rank=rank, step=0, samples=8, compute_s=compute_s, free_cpu=free_cpu, free_mem=0.25)


def started(predictor: Kalman) -> BalancePolicy:
    policy = BalancePolicy(predictor=predictor, warmup=1)
    policy.start(world_size=2, total=16, bounds=ShareBounds())
    return policy


def test_each_rank_is_told_its_own_load_before_its_time() -> None:
    policy = started(Listening())
    for k in range(2):
        policy.observe([record(0, 1.0), record(1, 0.5 / (k + 1), compute_s=0.1 * k)])
    heard = [p.heard for p in policy._predictors]
    assert heard == [[(1.0, 0.25), "time"], [(0.25, 0.25), "time"]]  # not in the warm-up
    policy.observe([record(0, 1.0), record(1, 0.125, compute_s=0.0)])  # without a time: nothing to learn
    assert heard[1] == [(0.25, 0.25), "time"]


@pytest.mark.parametrize(
    ("cpu", "mem", "changed"),
    [(0.5, 0.25, False), (0.58, 0.25, False), (0.65, 0.25, True), (0.5, 0.1, True), (math.nan, math.nan, False)],
)
def test_a_load_that_is_not_what_it_was_is_news(cpu: float, mem: float, changed: bool) -> None:
    policy = started(Narx())
    assert not policy.load_changed([(1.0, 0.25), (cpu, mem)])  # nothing to compare with
    for _ in range(2):
        policy.observe([record(0, 1.0), record(1, 0.5)])
    assert policy.load_changed([(1.0, 0.25), (cpu, mem)]) is changed


@pytest.mark.parametrize("predictor", [Narx, Kalman])
def test_an_announced_load_decides_the_very_next_batch(predictor: type[Kalman]) -> None:
    """Rank 1 becomes four times slower one step after its free processor time has shrunk to a quarter."""

    def slow(k: int) -> float:
        return 4.0 if k >= 15 and k % 15 < 3 else 1.0

    policy = BalancePolicy(predictor=predictor())
    policy.start(world_size=2, total=32, bounds=ShareBounds())
    controller = ShareController(policy, rank=0, world_size=2)
    drawn: list[tuple[int, ...]] = []
    for k in range(66):
        shares = controller.full_shares(0, k)
        drawn.append(shares)
        rows: list[Row] = []
        for rank, n in enumerate(shares):
            controller._local.clear()
            controller.measured(n, PER_SAMPLE_S * n * (slow(k) if rank else 1.0), 0.0)
            rows.append(controller.row(0, k, free_cpu=1.0 / slow(k + 1) if rank else 1.0, free_mem=0.5))
        controller.sent(0, k, lambda rows=rows: rows)
        controller.catch_up()
    # The fourth spell begins at step 60 and is announced with the record of step 59.
    assert drawn[59] == (16, 16)
    if predictor is Narx:
        assert drawn[60][1] < 10
    else:
        assert drawn[60] == (16, 16)
