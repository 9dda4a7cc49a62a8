"""Parameters that differ between ranks: who is named, and that it ends the run on every rank."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.balanced.decide.controller import Controller, ExchangeClock
from lightning_hetero.balanced.decide.rows import RankState, disagreement
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy

NAN = math.nan


@pytest.mark.parametrize(
    ("checksums", "named"),
    [
        ([1.0, 1.0, 2.0], "the parameters of rank 2 are not those of the other ranks"),
        ([3.0, 1.0, 1.0, 2.0, 1.0], "the parameters of ranks 0, 3 are not those of the other ranks"),
        ([0.0, 1.0], "the parameters of rank 0 and of rank 1 differ, and none has a majority"),
        ([1.0, 2.0, 1.0, 2.0], "the parameters of ranks 0, 2 and of ranks 1, 3 differ, and none"),
        ([3.0, 2.0, 1.0], "the parameters of rank 0 and of rank 1 and of rank 2 differ, and none"),
        ([2.0**52 - 1, 2.0**52 - 2, 2.0**52 - 1], "the parameters of rank 1 are not"),
    ],
)
def test_those_outside_the_majority_are_named_and_all_without_one(checksums: list[float], named: str) -> None:
    said = disagreement(4, 17, checksums)
    assert said is not None
    assert said.startswith(named)
    assert "epoch 4, step 17" in said


@pytest.mark.parametrize("checksums", [[NAN, NAN], [5.0, 5.0, 5.0], [0.0], [NAN, 5.0, 5.0]])
def test_nothing_is_said_of_ranks_that_agree_or_tell_nothing(checksums: list[float]) -> None:
    assert disagreement(0, 0, checksums) is None


@pytest.mark.parametrize("decides", [True, False])
def test_the_exchange_in_which_they_differ_is_an_error_on_every_rank(decides: bool) -> None:
    ranks = []
    for rank in range(3):
        policy = BalancePolicy()
        policy.start(world_size=3, total=24, bounds=ShareBounds())
        ranks.append(Controller(policy, rank=rank, world_size=3, exchange=ExchangeClock(every=1)))
    for step in range(3):
        rows = []
        for rank, controller in enumerate(ranks):
            controller.full_shares(0, step)
            controller.measured(8, 0.1, 0.0)
            rows.append(controller.row(0, step, RankState(checksum=float(step == 2 and rank == 1))))
        for controller in ranks:
            controller.sent(0, step, lambda rows=rows: rows, decides=decides)
    for controller in ranks:
        with pytest.raises(RuntimeError, match=r"the parameters of rank 1 are not .* epoch 0, step 2\."):
            controller.full_shares(0, 3)
