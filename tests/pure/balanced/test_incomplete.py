"""Records without all ranks' times, e.g. of a step in which one rank compiled: learned from, never decided by."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_hetero.balanced.decide.controller import ExchangeClock, ShareController
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy

WORLD, TOTAL, PER_SAMPLE_S = 2, 32, 0.01


class Ranks:
    """The controllers of all ranks; ``slow``: per rank, times the time of a sample; None: not measured."""

    def __init__(self, policies: Sequence[BalancePolicy]) -> None:
        self.step = 0
        self.controllers: list[ShareController] = []
        for rank, policy in enumerate(policies):
            policy.start(world_size=WORLD, total=TOTAL, bounds=ShareBounds())
            self.controllers.append(
                ShareController(policy, rank=rank, world_size=WORLD, exchange=ExchangeClock(every=1))
            )

    def train(self, *slow: float | None) -> tuple[int, ...]:
        """Trains one step; returns the shares it ran on, the same on all ranks."""
        shares = {controller.full_shares(0, self.step) for controller in self.controllers}
        assert len(shares) == 1
        (split,) = shares
        rows = []
        for controller, samples, factor in zip(self.controllers, split, slow, strict=True):
            if factor is not None:
                controller.measured(samples, factor * PER_SAMPLE_S * samples, 0.0)
            rows.append(controller.row(0, self.step))
        for controller in self.controllers:
            controller.sent(0, self.step, lambda: rows)
        self.step += 1
        return split


def test_the_others_are_learned_while_one_rank_is_not_measured() -> None:
    ranks = Ranks([BalancePolicy() for _ in range(WORLD)])
    for _ in range(6):
        assert ranks.train(1.0, 1.0) == (16, 16)
    for _ in range(4):
        assert ranks.train(3.0, None) == (16, 16)  # nothing is decided by what is known of one rank
    for controller in ranks.controllers:
        controller.drain()
        now_s = controller.policy.predict_s([16, 16])
        assert now_s[0] == pytest.approx(3 * 0.16, rel=0.05)
        assert now_s[1] == pytest.approx(0.16, rel=0.05)
        assert controller.report is not None and controller.report.step == 5  # the last one with all ranks' times
    ranks.train(3.0, 1.0)
    ranks.train(3.0, 1.0)
    assert ranks.train(3.0, 1.0)[0] <= 9  # 8 is exact


def test_a_record_with_no_time_at_all_teaches_nothing() -> None:
    policies = [BalancePolicy() for _ in range(WORLD)]
    ranks = Ranks(policies)
    for _ in range(6):
        ranks.train(1.0, 2.0)
    for controller in ranks.controllers:
        controller.drain()
    before = [policy.state_dict() for policy in policies]
    ranks.train(None, None)
    for controller in ranks.controllers:
        controller.drain()
    assert [policy.state_dict() for policy in policies] == before
