"""Loads on their way from the ranks' rows to a predictor that wants them."""

from __future__ import annotations

import pytest

from lightning_hetero.balanced.decide.controller import Row, ShareController
from lightning_hetero.predictors import Kalman, Narx
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy

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
