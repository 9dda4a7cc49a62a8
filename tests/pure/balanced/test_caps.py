"""Memory: what a rank learns of it, and the bounds of the split that follow."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.caps import MemoryCap, MemoryUse, held_bounds
from lightning_hetero.shares.policy import BalancePolicy, ShareDecision
from lightning_hetero.types import SpeedSample
from tests.pure.balanced.kit import Mail, Rank

# ---- one rank -------------------------------------------------------------------------------------------------


def test_a_device_with_a_memory_of_its_own_grows_by_a_quarter() -> None:
    cap = MemoryCap(careful=True)
    assert cap.most is None
    grown = []
    cap.fits(8)
    while (most := cap.most) is not None and most < 30:
        grown.append(most)
        cap.fits(most)
    assert grown == [10, 12, 15, 18, 22, 27]
    small = MemoryCap(careful=True)
    small.fits(1)
    assert small.most == 2


@given(st.integers(2, 400), st.integers(1, 400))
def test_a_cap_is_found_in_few_failures_and_never_lost(first: int, holds: int) -> None:
    """A rank that always wants more, on a device that holds ``holds`` samples; a failed step is done in halves."""
    cap, failures, share = MemoryCap(), 0, first
    for _ in range(60):
        if share <= holds:
            cap.fits(share)
        else:
            failures += 1
            piece = share
            while piece > holds:
                cap.fails(piece)
                piece = -(-piece // 2)
            cap.fits(piece)
        share = share if cap.most is None else cap.most
    assert failures <= 1 + math.ceil(math.log(2 / 0.9, 1 / 0.9))
    if failures:
        assert cap.most is not None and 0.7 * holds - 1 <= cap.most <= holds


def test_a_resumed_run_does_not_try_again() -> None:
    cap = MemoryCap()
    cap.goes_on(5)
    cap.fits(5)
    assert cap.most == 5 and cap.exceeded_by(6)
    careful = MemoryCap(careful=True)
    careful.goes_on(16)
    assert careful.most == 20 and not careful.exceeded_by(21)


def test_what_is_measured_of_memory_limits_growth_but_takes_nothing_away() -> None:
    cap = MemoryCap(careful=True)
    cap.fits(16)
    cap.estimate = 18
    assert cap.most == 18
    cap.estimate = 12
    assert cap.most == 16


# ---- bytes ----------------------------------------------------------------------------------------------------

MIB = 2.0**20


def use_of(*steps: tuple[int, float, float]) -> MemoryUse:
    use = MemoryUse()
    for samples, base, peak in ((4, 0, 100), (4, 0, 100), *steps):  # the first two are not looked at
        use.observe(samples, base * MIB, peak * MIB)
    return use


def test_of_one_size_all_that_a_step_makes_is_taken_to_grow_with_samples() -> None:
    assert use_of((10, 300, 500)).most(1000 * MIB) == 30  # 300 + 20 per sample: fewer than the 50 that fit


# ---- bounds of the split --------------------------------------------------------------------------------------


@given(
    st.lists(st.none() | st.integers(1, 40), min_size=2, max_size=5), st.sampled_from([1, 4]), st.sampled_from([1, 2])
)
def test_bounds_admit_a_split_and_exceed_no_cap_unless_they_must(
    most: list[int | None], quantum: int, least: int
) -> None:
    world, total = len(most), 16 * len(most)
    lower, upper = ShareBounds(least=least).resolve(world, total, quantum)
    low, high, enough = held_bounds(lower, upper, most, total=total, quantum=quantum, least=least)
    assert all(a <= b for a, b in zip(low, high, strict=True))
    assert all(b <= a for a, b in zip(upper, high, strict=True))
    assert sum(high) >= total and all(b % quantum == 0 for b in high)
    within = [b if m is None else min(b, m // quantum * quantum) for b, m in zip(upper, most, strict=True)]
    assert enough == (sum(b if b >= least else 0 for b in within) >= total)
    if enough:
        assert all(m is None or b <= m for b, m in zip(high, most, strict=True))


def policy_of(world: int = 2, total: int = 16, **bounds: object) -> BalancePolicy:
    policy = BalancePolicy(warmup=0)
    policy.start(world_size=world, total=total, bounds=ShareBounds(**bounds))  # type: ignore[arg-type]
    return policy


def told(policy: BalancePolicy, *most: int | None) -> ShareDecision | None:
    """What a step says whose time is not to be believed."""
    return policy.limit(most, [0.0] * len(most), [0.0] * len(most))


def records_of(shares: Sequence[int], slow: Sequence[float]) -> list[SpeedSample]:
    return [SpeedSample(rank=r, step=0, samples=n, compute_s=s * (0.01 + 0.01 * n))
            for r, (n, s) in enumerate(zip(shares, slow, strict=True))]  # fmt: skip


def test_a_fast_rank_gets_no_more_than_it_holds() -> None:
    policy = policy_of()
    told(policy, None, 9)
    for _ in range(20):
        policy.observe(records_of(policy.shares, (3.0, 1.0)))
    assert policy.shares == (7, 9)
    assert told(policy, None, 11) is None  # room: nothing is urgent
    for _ in range(20):
        policy.observe(records_of(policy.shares, (3.0, 1.0)))
    assert policy.shares == (5, 11)


def test_caps_are_in_the_checkpoint_and_for_as_many_ranks() -> None:
    policy = policy_of()
    told(policy, None, 5)
    state = json.loads(json.dumps(policy.state_dict()))
    resumed = BalancePolicy(warmup=0)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["most_samples"] == [None, 5]
    resumed.start(world_size=2, total=16, bounds=ShareBounds())
    assert resumed.shares == (11, 5) and resumed.limits.most_samples == (None, 5)
    other = BalancePolicy()
    other.load_state_dict(state)
    other.start(world_size=3, total=18, bounds=ShareBounds())
    assert other.shares == (6, 6, 6)


# ---- between ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 3])
def test_all_ranks_obey_in_the_same_batch_whatever_their_read_ahead(lag: int) -> None:
    mail, steps = Mail(2), 12
    ranks = [Rank(r, mail, lag=lag, ahead=lag, exchange=ExchangeClock(every=1), policy=BalancePolicy()) for r in (0, 1)]
    for step in range(steps):
        for rank in ranks:
            rank.draw(0, step, steps, own_ahead=lag if rank.rank else 0)
        for rank in ranks:
            most = 20.0 if rank.rank == 1 and step >= 4 else math.nan
            rank.controller.measured(rank.shares[0, step][rank.rank], 0.1, 0.0)
            tag = (0, step)
            mail.send(rank.rank, tag, rank.controller.row(0, step, most_samples=most))
            rank.controller.sent(0, step, lambda tag=tag: mail.read(tag))
    assert ranks[0].shares == ranks[1].shares
    assert [shares[1] > 20 for _, shares in sorted(ranks[0].shares.items())] == [s <= 4 + lag for s in range(steps)]
