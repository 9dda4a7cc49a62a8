"""`ShareController`: all ranks hold the same shares for a batch, however far their own loaders read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.balanced.decide.controller import ExchangeClock, ShareController, Tag, shares_digest
from lightning_hetero.shares.policy import BalancePolicy
from tests.pure.balanced.kit import FIXED_S, PER_SAMPLE_S, Mail, Noting, Rank

# ---- the lag rule ------------------------------------------------------------------------------------------


class Moody(Noting):
    """Calls two records in three urgent, by their content."""

    def urgent(self, samples: Sequence[int], compute_s: Sequence[float]) -> bool:
        return (samples[0] + len(self.taken)) % 3 > 0


@given(
    policy=st.sampled_from([Noting, Moody, BalancePolicy]),
    world=st.integers(2, 4),
    lag=st.integers(0, 5),
    every=st.one_of(st.none(), st.integers(1, 4)),
    steps=st.integers(1, 14),
    speed=st.sampled_from([0.01, 0.3, 1.0]),  # short steps make ExchangeClock choose k > 1
    data=st.data(),
)
def test_all_ranks_hold_the_same_shares_and_use_exactly_the_records_allowed(
    policy: type[BalancePolicy],
    world: int,
    lag: int,
    every: int | None,
    steps: int,
    speed: float,
    data: st.DataObject,
) -> None:
    """Each rank's own read-ahead is at most the agreed lag and changes at will (slow workers).

    When a rank finds the time for a record that was put off (`ShareController.catch_up`) is its own affair, too.
    """
    mail = Mail(world)
    ranks = [
        Rank(r, mail, lag=lag, ahead=0, exchange=ExchangeClock(every=every), policy=policy())
        for r in range(world)
    ]
    per_rank = st.lists(st.integers(0, lag), min_size=world, max_size=world)
    ahead = data.draw(st.lists(per_rank, min_size=1, max_size=5), label="ahead")
    order = data.draw(st.permutations(range(world)), label="order")
    idle = data.draw(st.lists(st.booleans(), min_size=1, max_size=7), label="idle")
    for epoch in range(3):
        for step in range(steps):
            for r in order:
                ranks[r].draw(epoch, step, steps, ahead[(epoch + step) % len(ahead)][r])
            for r in order:
                ranks[r].train(epoch, step, speed * (1 + r))
                if idle[(5 * r + step) % len(idle)]:
                    ranks[r].controller.catch_up()
    for other in ranks[1:]:
        assert other.shares == ranks[0].shares
        assert other.controller._last_exchange == ranks[0].controller._last_exchange
    assert all(len(sent) == world for sent in mail.rows.values())  # the schedule is everybody's
    for rank in ranks:
        rank.controller.drain()
    assert len({rank.controller.policy.shares for rank in ranks}) == 1
    check_records_used(ranks, sorted(mail.rows), lag)


def check_records_used(ranks: Sequence[Rank], tags: Sequence[Tag], lag: int) -> None:
    """Every batch used all records up to its limit; only the one at the limit itself may have been put off."""
    for rank in ranks:
        policy = rank.controller.policy
        if not isinstance(policy, Noting):
            continue
        assert policy.taken == [step for _, step in tags]
        for (epoch, step), taken in rank.taken_before.items():
            limit = (epoch, step - 1 - lag)
            allowed = sum(tag <= limit for tag in tags)
            least = allowed if policy.urgent_always or limit not in tags else allowed - 1
            assert least <= taken <= allowed


# ---- when to exchange --------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-4, 0.1), min_size=1, max_size=20), st.integers(0, 25))
def test_the_interval_depends_on_the_limit_only(steps_s: list[float], limit: int) -> None:
    """A rank that has read more exchanges than another must not exchange on another schedule."""
    late, early = ExchangeClock(), ExchangeClock()
    for t, step_s in enumerate(steps_s):
        late.observe((0, t), step_s)
        if t <= limit:
            early.observe((0, t), step_s)
    assert late.interval((0, limit)) == early.interval((0, limit))


def test_short_steps_are_exchanged_less_often_and_averaged() -> None:
    mail = Mail(2)
    ranks = [
        Rank(r, mail, lag=0, ahead=0, exchange=ExchangeClock(), policy=BalancePolicy()) for r in range(2)
    ]
    for step in range(40):
        for rank in ranks:
            rank.draw(0, step, 40, 0)
        for rank in ranks:
            rank.train(0, step, 0.3, noise=1.0 + 0.1 * (step % 2))  # 31.5 to 34.65 ms: k = 2
    tags = sorted(step for _, step in mail.rows)
    assert tags[0] == 0 and {b - a for a, b in pairwise(tags[4:])} == {2}
    last = mail.rows[0, tags[-1]][0]
    samples = int(last[2])
    assert last[3] == pytest.approx(1.05 * 0.3 * (FIXED_S + PER_SAMPLE_S * samples))  # mean of both steps


def test_a_row_averages_only_steps_of_the_latest_share() -> None:
    controller = ShareController(BalancePolicy(), rank=0, world_size=2)
    for samples, compute_s, wait_s in ((8, 9.0, 9.0), (4, 1.0, 0.5), (4, 3.0, 0.1)):
        controller.measured(samples, compute_s, wait_s)
    controller.full_shares(0, 2)
    assert controller.row(0, 2)[2:5] == (4.0, 2.0, 0.3)


# ---- agreement ---------------------------------------------------------------------------------------------


def test_a_disagreement_names_step_and_both_sides() -> None:
    mail = Mail(2)
    ranks = [
        Rank(r, mail, lag=0, ahead=0, exchange=ExchangeClock(every=1), policy=BalancePolicy())
        for r in range(2)
    ]
    ranks[1].controller.policy.shares = (30, 34)
    for rank in ranks:
        rank.draw(2, 0, 9, 0)
    for rank in ranks:
        rank.train(2, 0, 1.0)
    for rank, other in ((0, 1), (1, 0)):
        with pytest.raises(RuntimeError) as error:
            ranks[rank].draw(2, 1, 9, 0)
        text = str(error.value)
        assert "epoch 2, step 0" in text and f"rank {rank} ran" in text and f"rank {other} ran" in text
        assert f"{shares_digest(2, 0, (32, 32)):#x}" in text and f"{shares_digest(2, 0, (30, 34)):#x}" in text


def test_a_step_without_times_is_checked_but_not_learned_from() -> None:
    mail = Mail(2)
    ranks = [
        Rank(r, mail, lag=0, ahead=0, exchange=ExchangeClock(every=1), policy=Noting()) for r in range(2)
    ]
    for rank in ranks:
        rank.draw(0, 0, 9, 0)
        mail.send(rank.rank, (0, 0), rank.controller.row(0, 0))
        rank.controller.sent(0, 0, lambda: mail.read((0, 0)))
    ranks[0].controller.drain()
    assert ranks[0].controller.report is None and ranks[0].controller.policy.taken == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("through_at", [0, 40])
def test_the_others_are_balanced_while_a_ranks_stream_is_through(through_at: int) -> None:
    """Rank 0 has no samples from a step on, rank 2 becomes slow; a rank never measured is as the slowest."""
    mail = Mail(3)
    ranks = [
        Rank(r, mail, lag=2, ahead=2, exchange=ExchangeClock(every=1), policy=BalancePolicy()) for r in range(3)
    ]
    for step in range(120):
        for rank in ranks:
            rank.draw(0, step, 120, 2)
        short, tag = (step >= through_at, False, False), (0, step)
        for rank in ranks:
            samples = rank.shares[tag][rank.rank]
            slow = 3.0 if rank.rank == 2 and step > 40 else 1.0
            if not short[rank.rank]:
                rank.controller.measured(samples, slow * (FIXED_S + PER_SAMPLE_S * samples), 0.0)
            mail.send(rank.rank, tag, rank.controller.row(*tag))
            rank.controller.sent(*tag, lambda tag=tag: mail.read(tag), short)
    for rank in ranks:
        rank.controller.drain()
        assert rank.shares == ranks[0].shares
        report = rank.controller.report
        assert (report is None) == (not through_at) and (report is None or report.step < through_at)
    _, one, two = ranks[0].controller.policy.shares
    assert one > 1.5 * two
