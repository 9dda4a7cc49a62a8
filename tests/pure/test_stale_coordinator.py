"""The coordinator: each rule by a hand-written sequence of events, all promises over random schedules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.predictors import Ewma
from lightning_hetero.stale.coordinator import Coordinator
from lightning_hetero.stale.policy import (
    Apply,
    Asp,
    Backup,
    Bsp,
    Buffered,
    Claim,
    Drop,
    Flexible,
    Grant,
    Hold,
    Policy,
    Pool,
    Pooled,
    Saps,
    Ssp,
    by_name,
)
from lightning_hetero.stale.protocol import Accepted, Effect, Granted, Passed, Refused, Reissued, Updated
from tests.pure.stale_random import Books, Case, run


def started(
    policy: Policy | None = None, *, workers: int = 2, ends: tuple[int, ...] = (8, 16, 24), **kw: Any
) -> Coordinator:
    coordinator = Coordinator(policy or Flexible(), workers=range(workers), predictor=Ewma(weight=0.5), **kw)
    assert coordinator.begin(0, ends, now=0.0) == []
    return coordinator


def only(effects: list[Effect]) -> Effect:
    assert len(effects) == 1, effects
    return effects[0]


def granted(effects: list[Effect]) -> Granted:
    """The one grant among the effects."""
    grants = [e for e in effects if isinstance(e, Granted)]
    assert len(grants) == 1, effects
    return grants[0]


def kinds(effects: list[Effect]) -> list[str]:
    return [type(e).__name__ for e in effects]


class Hasty(Pooled):
    """Gives a sample at a time to whoever asks; may insist on a verdict."""

    name, holds = "hasty", "never"

    def __init__(self, verdict: Apply | None = None) -> None:
        self.verdict = verdict

    def claim(self, claim: Claim) -> Grant | Hold:
        return Grant(samples=1)

    def update(self, pool: Pool) -> Apply | None:
        return super().update(pool) if self.verdict is None or not pool.pushes else self.verdict


# --- 1: the first claim of an epoch ---


def test_a_rank_that_comes_when_the_epoch_is_over_still_gets_one_step() -> None:
    it = started(ends=(4,), workers=2)
    first = granted(it.claim(0, 0, 0.0))
    it.push(0, first.lease, 1.0, tick=0)
    for now in (5.0, 7.0):  # rank 1 does not come: its part is done by rank 0, in fill-ins
        filled = granted(it.claim(0, 0, now))
        effects = it.push(0, filled.lease, now + 1.0, tick=0)
    assert isinstance(effects[-1], Updated) and it.over
    dummy = granted(it.claim(1, 0, 9.0))
    assert dummy.spans == () and dummy.samples == 0 and dummy.tick == 1
    assert only(it.claim(1, 0, 9.5)) == Passed(rank=1, tick=1)


def test_a_rank_that_is_late_into_the_epoch_is_granted_samples_of_the_present_tick() -> None:
    it = started(ends=(4, 8, 40))
    for tick in (0, 1):
        while it.tick == tick:
            now = 10.0 * (tick + 1)
            it.push(0, granted(it.claim(0, tick, now)).lease, now + 1.0, tick=tick)
    late = granted(it.claim(1, 0, 30.0))
    assert late.samples >= 1 and late.tick == 2 and late.base == it.version
    assert only(it.claim(1, 0, 30.5)[-1:]) == Passed(rank=1, tick=2)  # the second claim is like any other


def test_a_first_claim_is_never_held() -> None:
    for policy in (Flexible(grace=math.inf), Bsp(), Ssp(bound=0), Backup()):
        it = started(policy, workers=3, ends=(2, 4, 6))
        for rank in range(3):
            assert granted(it.claim(rank, 0, 0.0)).rank == rank


def test_for_the_first_tick_live_workers_count_before_they_claim() -> None:
    it = started(Flexible(), workers=4, ends=(64, 128))
    assert granted(it.claim(2, 0, 0.0)).samples == 16
    it = started(Flexible(), workers=4, ends=(64, 128))
    first = granted(it.claim(2, 0, 0.0))
    effects = it.push(2, first.lease, 16.0, tick=0)
    assert kinds(effects) == ["Accepted"]
    assert it.claim(2, 0, 16.0) == []  # the others are expected at this very moment: wait for them, within the grace
    assert it.wake_s() == pytest.approx(16.0 + 0.1 * 16.0)
    assert granted(it.wake(it.wake_s())).samples == 12  # not more than a part of what is missing


def test_a_grant_given_back_does_not_count_as_the_step() -> None:
    it = started(Bsp(), ends=(2, 4))
    for _ in range(3):
        grant = granted(it.claim(0, 0, 0.0))
        assert it.ledger.leased == 1
        assert only(it.give_back(0, grant.lease, 1.0)) == Reissued(
            rank=0, lease=grant.lease, samples=1, reason="given back"
        )
        assert it.ledger.leased == 0
    assert it.give_back(0, 99, 1.0) == []


# --- 2: the witness ---


def test_late_contributions_alone_never_end_a_tick() -> None:
    it = started(Asp(chunk=2), workers=2, ends=(2, 4, 8))
    late, first = granted(it.claim(1, 0, 0.0)), granted(it.claim(0, 0, 0.0))
    assert isinstance(it.push(0, first.lease, 1.0, tick=0)[1], Updated) and it.tick == 1
    effects = it.push(1, late.lease, 2.0, tick=0)
    assert it.ledger.arrived == it.ends[1] and it.tick == 1
    assert effects[1].ends_tick is False  # type: ignore[union-attr]
    in_tick = granted(it.claim(0, 1, 2.0))
    it.push(0, in_tick.lease, 3.0, tick=1)
    assert it.tick == 2
    # the same with a policy that pools: no update at all before somebody in the tick has contributed
    it = started(Hasty(), workers=2, ends=(1, 2, 4))
    late, first = granted(it.claim(1, 0, 0.0)), granted(it.claim(0, 0, 0.0))
    it.push(0, first.lease, 1.0, tick=0)
    assert kinds(it.push(1, late.lease, 2.0, tick=0)) == ["Accepted"]
    in_tick = granted(it.claim(1, 1, 2.0))
    assert kinds(it.push(1, in_tick.lease, 3.0, tick=1)) == ["Accepted", "Updated"]


def test_a_worker_in_the_tick_is_granted_even_if_late_leases_cover_the_need() -> None:
    it = started(Flexible(bound=9, grace=math.inf), workers=3, ends=(9, 12, 20))
    slow = granted(it.claim(1, 0, 0.0))
    other = granted(it.claim(2, 0, 0.0))
    assert slow.samples + other.samples == 6
    while it.tick == 0:
        effects = it.claim(0, 0, 0.0) or it.wake(60.0)
        it.push(0, granted(effects).lease, 1.0, tick=0)
    assert it.ends[1] - it.ledger.arrived <= 6, "what is late covers the tick"
    assert granted(it.claim(0, 1, 1.0)).samples >= 1


def test_the_last_sample_is_kept_for_who_can_end_the_tick() -> None:
    """A late first claim must not take the only sample that is left for a worker in the tick."""
    it = started(Asp(chunk=1), workers=2, ends=(1, 2))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.tick == 1
    late = granted(it.claim(1, 0, 2.0))
    assert late.spans == ()
    assert granted(it.claim(0, 1, 2.0)).samples == 1


# --- 3: room ---


def test_one_sample_per_later_tick_stays_unleased() -> None:
    it = started(Asp(chunk=100), workers=3, ends=(4, 8, 12, 16))
    assert granted(it.claim(0, 0, 0.0)).samples == 13
    assert granted(it.claim(1, 0, 0.0)).spans == ()  # nothing may be leased: a dummy
    assert it.claim(1, 0, 0.1) == []
    effects = it.push(0, 1, 1.0, tick=0)
    assert effects[1] == Updated(
        version=1, tick=1, samples=13, contributions=effects[1].contributions, worth=13 / 4, ends_tick=True
    )  # type: ignore[union-attr]
    for tick in (1, 2, 3):
        grant = granted(it.claim(0, tick, float(tick)))
        assert grant.samples == 1
        it.push(0, grant.lease, tick + 0.5, tick=tick)
    assert it.over and it.version == 4


# --- 4, 5: when the pool becomes an update ---


def test_an_update_comes_when_the_cumulative_count_is_reached_and_a_surplus_counts_for_the_next() -> None:
    it = started(Flexible(), workers=2, ends=(8, 16, 24))
    a, b = granted(it.claim(0, 0, 0.0)), granted(it.claim(1, 0, 0.0))
    assert (a.spans, b.spans) == (((0, 4),), ((4, 8),))
    it.push(0, a.lease, 1.0, tick=0)
    assert it.claim(0, 0, 1.0) == []
    fill = granted(it.wake(it.wake_s()))
    assert it.push(0, fill.lease, 1.5, tick=0)[0] == Accepted(rank=0, lease=3, samples=fill.samples, staleness=0)
    assert it.ledger.arrived == 4 + fill.samples
    effects = it.push(1, b.lease, 2.0, tick=0)
    updated = effects[1]
    assert isinstance(updated, Updated)
    assert (updated.version, updated.tick, updated.samples, updated.worth) == (1, 1, 8 + fill.samples, 1.0)
    assert [c.rank for c in updated.contributions] == [0, 0, 1]
    assert it.ends[1] - it.ledger.arrived == 8 - fill.samples, "the surplus is part of the next batch"


def test_asynchronous_updates_come_with_every_push_and_end_ticks_by_count() -> None:
    it = started(Asp(chunk=3), workers=2, ends=(8, 16))
    seen: list[tuple[float, bool, int]] = []
    while not it.over:
        effects = it.push(0, granted(it.claim(0, it.tick, 0.0)).lease, 1.0, tick=it.tick)
        seen += [(e.worth, e.ends_tick, e.tick) for e in effects if isinstance(e, Updated)]
    w = 3 / 8
    assert seen == [
        (w, False, 0), (w, False, 0), (w, True, 1), (w, False, 1), (w, False, 1), (1 / 8, True, 2)
    ]  # fmt: skip


def test_after_the_last_tick_everybody_is_passed() -> None:
    it = started(Bsp(), workers=3, ends=(3,))
    grants = [granted(it.claim(r, 0, 0.0)) for r in range(3)]
    for rank in (0, 1):
        assert kinds(it.push(rank, grants[rank].lease, 1.0, tick=0)) == ["Accepted"]
        assert it.claim(rank, 0, 1.0) == []
    effects = it.push(2, grants[2].lease, 2.0, tick=0)
    assert kinds(effects) == ["Accepted", "Updated", "Passed", "Passed"]
    assert effects[2:] == [Passed(rank=0, tick=1), Passed(rank=1, tick=1)]
    assert only(it.claim(2, 0, 2.0)) == Passed(rank=2, tick=1)
    assert it.wake_s() == math.inf and it.ledger.leased == 0


# --- 6: not finite ---


def test_gradients_that_are_not_finite_use_up_their_samples_and_witness_the_tick() -> None:
    it = started(Bsp(), workers=2, ends=(4, 8))
    grants = [granted(it.claim(r, 0, 0.0)) for r in range(2)]
    assert only(it.push(0, grants[0].lease, 1.0, tick=0, finite=False)) == Refused(
        rank=0, lease=grants[0].lease, samples=2, reason="nonfinite"
    )
    effects = it.push(1, grants[1].lease, 1.0, tick=0, finite=False)
    assert effects[1] == Updated(version=1, tick=1, samples=0, contributions=())
    assert it.ledger.arrived == 4, "computed again they would not be finite again"


# --- 7: stale ---


def test_what_is_too_old_is_issued_again_at_once_and_refused_when_it_comes() -> None:
    it = started(Drop(bound=1, chunk=2), workers=2, ends=(20, 40))
    slow = granted(it.claim(1, 0, 0.0))
    effects: list[Effect] = []
    for _ in range(2):
        effects = it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.version == 2
    assert effects[-1] == Reissued(rank=1, lease=slow.lease, samples=2, reason="stale")
    assert it.ledger.leased == 0
    assert only(it.push(1, slow.lease, 2.0, tick=0)) == Refused(rank=1, lease=slow.lease, samples=2, reason="stale")
    assert granted(it.claim(1, 0, 2.0)).base == 2


def test_what_is_as_old_as_the_bound_is_accepted() -> None:
    it = started(Drop(bound=1, chunk=2), workers=2, ends=(20, 40))
    slow = granted(it.claim(1, 0, 0.0))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.push(1, slow.lease, 2.0, tick=0)[0] == Accepted(rank=1, lease=slow.lease, samples=2, staleness=1)


def test_damping_scales_what_is_stale() -> None:
    it = started(Asp(damping="dynsgd", chunk=2), workers=2, ends=(20, 40))
    slow = granted(it.claim(1, 0, 0.0))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.push(1, slow.lease, 2.0, tick=0)[0] == Accepted(
        rank=1, lease=slow.lease, samples=2, staleness=1, scale=0.5
    )


def test_a_lease_that_nobody_knows_is_gone() -> None:
    it = started()
    grant = granted(it.claim(0, 0, 0.0))
    for rank, lease in ((0, 77), (1, grant.lease), (9, grant.lease)):
        assert only(it.push(rank, lease, 1.0, tick=0, samples=3)) == Refused(
            rank=rank, lease=lease, samples=3, reason="gone"
        )
    it.push(0, grant.lease, 1.0, tick=0)
    assert only(it.push(0, grant.lease, 1.0, tick=0)).reason == "gone"  # type: ignore[union-attr]


# --- 8: liveness, deaths, joins ---


def test_a_stalled_worker_loses_its_lease_but_not_its_welcome() -> None:
    it = started(Flexible(), workers=2, ends=(8, 16), liveness_factor=10.0, liveness_s=5.0)
    stopped, other = granted(it.claim(0, 0, 0.0)), granted(it.claim(1, 0, 0.0))
    assert it.wake_s() == 50.0, "nothing is known: the product of both"
    it.push(1, other.lease, 1.0, tick=0)
    assert it.wake(49.0) == [] and it.live == {0, 1}
    assert only(it.wake(50.0)) == Reissued(rank=0, lease=stopped.lease, samples=4, reason="stalled")
    assert it.live == {1} and it.shares() == (0, 8)
    again = granted(it.claim(1, 0, 51.0))
    assert again.spans == stopped.spans
    assert only(it.push(0, stopped.lease, 60.0, tick=0)) == Refused(
        rank=0, lease=stopped.lease, samples=4, reason="gone"
    )
    assert it.live == {0, 1}
    assert it.predicted_s(0, 4) == 50.0, "a stopped worker is not taken to be slower than the limit"
    # once speeds are known: ten times the prediction, at least five seconds
    it = started(Flexible(), workers=2, ends=(80, 160))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 4.0, tick=0)
    it.push(1, granted(it.claim(1, 0, 0.0)).lease, 4.0, tick=0)
    assert granted(it.claim(0, 1, 4.0)).samples == 40
    assert it.wake_s() == pytest.approx(44.0)
    it = started(Flexible(), workers=2, ends=(80, 160))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 0.4, tick=0)
    it.push(1, granted(it.claim(1, 0, 0.0)).lease, 0.4, tick=0)
    it.claim(0, 1, 0.4)
    assert it.wake_s() == pytest.approx(5.4)


def test_workers_that_are_slower_than_the_limit_are_not_refused_for_ever() -> None:
    it = started(Bsp(), workers=1, ends=(4, 8), liveness_factor=2.0, liveness_s=1.0)
    now, refused = 0.0, 0
    while not it.over:
        grant = granted(it.claim(0, it.tick, now))
        while it.wake_s() < now + 30.0:
            it.wake(it.wake_s())
        now += 30.0
        refused += isinstance(it.push(0, grant.lease, now, tick=it.tick)[0], Refused)
        assert refused < 8
    assert refused >= 1 and it.ledger.arrived == 8


def test_the_part_of_a_dead_worker_goes_to_the_others() -> None:
    it = started(Bsp(), workers=3, ends=(9, 18))
    grants = [granted(it.claim(r, 0, 0.0)) for r in range(3)]
    it.push(0, grants[0].lease, 1.0, tick=0)
    assert it.claim(0, 0, 1.0) == []
    effects = it.lost(1, 2.0)
    assert effects[0] == Reissued(rank=1, lease=grants[1].lease, samples=3, reason="its worker is dead")
    assert granted(effects).spans == grants[1].spans and granted(effects).rank == 0
    assert it.live == {0, 2} and it.shares() == (5, 0, 4)
    assert it.lost(1, 3.0) == []


def test_a_worker_that_joins_takes_part_at_once() -> None:
    it = started(Flexible(), workers=1, ends=(8, 16))
    granted(it.claim(0, 0, 0.0))
    assert it.joined(3, 0.5) == [] and it.live == {0, 3}
    assert granted(it.claim(3, 0, 0.5)).samples >= 1
    it.lost(3, 1.0)
    it.joined(3, 2.0)
    assert granted(it.claim(3, 0, 2.0)).rank == 3, "again: its first claim"


def test_a_worker_that_joins_is_not_behind_those_that_were_there() -> None:
    it = started(Ssp(bound=1, chunk=1), workers=1, ends=(20, 40))
    for _ in range(5):
        it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    it.joined(3, 1.0)
    for _ in range(2):
        it.push(0, granted(it.claim(0, 0, 1.0)).lease, 2.0, tick=0)
    assert it.claim(0, 0, 2.0) == [], "from now on it is"


# --- 9: second issue ---


def end_of_epoch() -> tuple[Coordinator, Granted, Granted]:
    """The last tick: rank 0 is idle, rank 1 should have ended its four samples at 2 s."""
    it = started(Flexible(bound=9), ends=(8, 16))
    for rank in (0, 1):
        it.claim(rank, 0, 0.0)
    for rank in (0, 1):
        it.push(rank, rank + 1, 1.0, tick=0)
    a, b = granted(it.claim(0, 1, 1.0)), granted(it.claim(1, 1, 1.0))
    assert it.ledger.free == 0 and a.samples == b.samples == 4
    it.push(0, a.lease, 2.0, tick=1)
    assert it.claim(0, 1, 2.0) == []
    assert it.wake_s() == pytest.approx(2.1)
    assert it.wake(2.1) == []  # the grace is over, but there is nothing to give
    assert it.wake_s() == pytest.approx(2.5)
    second = granted(it.wake(it.wake_s()))
    assert second.rank == 0 and second.spans == b.spans
    assert it.ledger.leased == 4
    assert sum(d.samples for d in it.roster.due(1)) == 4, "each sample is expected once"
    return it, b, second


@pytest.mark.parametrize("original_first", [True, False])
def test_an_overdue_chunk_is_issued_a_second_time_and_the_first_result_wins(original_first: bool) -> None:
    it, original, second = end_of_epoch()
    first, other = (original, second) if original_first else (second, original)
    effects = it.push(first.rank, first.lease, 3.0, tick=1)
    assert kinds(effects) == ["Accepted", "Updated"] and it.over
    assert only(it.push(other.rank, other.lease, 3.1, tick=1)) == Refused(
        rank=other.rank, lease=other.lease, samples=4, reason="gone"
    )
    assert it.ledger.arrived == 16


@pytest.mark.parametrize("original_first", [True, False])
def test_if_one_of_two_issues_fails_the_other_keeps_the_samples(original_first: bool) -> None:
    it, original, second = end_of_epoch()
    dead, other = (original, second) if original_first else (second, original)
    assert it.lost(dead.rank, 2.6) == [] and it.ledger.leased == 4
    assert kinds(it.push(other.rank, other.lease, 3.0, tick=1)) == ["Accepted", "Updated"]


def test_if_both_issues_fail_the_samples_are_free_again() -> None:
    it, original, second = end_of_epoch()
    it.give_back(second.rank, second.lease, 2.6)
    assert kinds(it.lost(original.rank, 2.7)) == ["Reissued"] and it.ledger.free == 4


# --- 10: hints ---


def test_grants_carry_the_slice_that_comes_next() -> None:
    it = started(Bsp(), workers=2, ends=(4, 8, 12), ahead=1)
    a, b = granted(it.claim(0, 0, 0.0)), granted(it.claim(1, 0, 0.0))
    assert (a.spans, a.hint, b.spans, b.hint) == (((0, 2),), (4, 6), ((2, 4),), (6, 8))
    it.push(0, a.lease, 1.0, tick=0)
    it.push(1, b.lease, 1.0, tick=0)
    assert granted(it.claim(1, 1, 1.0)).spans == (b.hint,)
    it = started(Bsp(), workers=2, ends=(4, 8, 12))
    assert granted(it.claim(0, 0, 0.0)).hint == (0, 0)


def test_hints_are_the_slices_of_the_next_ticks() -> None:
    it = started(Bsp(), workers=2, ends=(4, 8, 11), ahead=2)
    assert (it.hints(0), it.hints(1)) == ([(0, 2), (4, 6)], [(2, 4), (6, 8)])
    a, b = granted(it.claim(0, 0, 0.0)), granted(it.claim(1, 0, 0.0))
    assert (a.spans, a.hint, b.spans, b.hint) == (((0, 2),), (8, 10), ((2, 4),), (10, 11))
    it.push(0, a.lease, 1.0, tick=0)
    it.push(1, b.lease, 1.0, tick=0)
    assert it.hints(1) == [(6, 8), (10, 11)]  # for one that begins the epoch only now
    assert it.hints(7) == [(0, 0), (0, 0)]  # nobody knows it yet
    for tick in (1, 2):
        for rank in (0, 1):
            it.push(rank, granted(it.claim(rank, tick, 1.0)).lease, 2.0, tick=tick)
    assert it.over and it.hints(0) == []
    assert started(Bsp(), workers=2, ends=(4, 8)).hints(0) == []


def test_slices_that_may_have_been_fetched_survive_small_changes_of_speed() -> None:
    for seconds, share in ((1.05, 16), (2.0, 11)):
        it = started(Flexible(), workers=2, ends=(32, 64, 96), ahead=1)
        a, b = granted(it.claim(0, 0, 0.0)), granted(it.claim(1, 0, 0.0))
        it.push(0, a.lease, 1.0, tick=0)
        it.push(1, b.lease, seconds, tick=0)
        fast = granted(it.claim(0, 1, seconds))
        assert fast.samples == 32 - share and fast.spans[0] == a.hint
        assert it.ledger.free_in_slice(1, 1) == 16, "who takes more takes it from later batches"
        grant = granted(it.claim(1, 1, seconds))
        assert grant.samples == share and grant.spans[0][0] == b.hint[0]


# --- 11: nobody waits without end ---


class Stubborn(Pooled):
    """Would keep everybody waiting for ever."""

    name, holds = "stubborn", "barrier"

    def claim(self, claim: Claim) -> Grant | Hold:
        return Hold()


class Forgetful(Stubborn):
    """Extends its own deadline for ever."""

    holds = "grace"

    def claim(self, claim: Claim) -> Grant | Hold:
        return Hold(until_s=claim.now_s + 1.0)


@pytest.mark.parametrize("policy", [Stubborn(), Forgetful()])
def test_whatever_a_policy_does_the_epoch_ends(policy: Policy) -> None:
    policy.holds = "barrier"  # type: ignore[misc]
    books = run(Coordinator(policy, workers=range(3)), Case(ends=((7, 9, 20),), rates_s=(0.1, 0.1, 0.8)))
    assert len(books.updates[0]) == 3




def test_an_update_that_breaks_a_rule_is_an_error() -> None:
    for verdict, words in ((Apply(), "exactly when pool.complete"), (Apply(ends_tick=False), "")):
        it = started(Hasty(verdict), ends=(2, 4))
        grant = granted(it.claim(0, 0, 0.0))
        if not words:
            assert isinstance(it.push(0, grant.lease, 1.0, tick=0)[1], Updated)
            continue
        with pytest.raises(RuntimeError, match=words):
            it.push(0, grant.lease, 1.0, tick=0)


def test_what_is_unclaimed_of_the_next_batch() -> None:
    seen: list[int] = []

    class Watched(Hasty):
        def claim(self, claim: Claim) -> Grant | Hold:
            seen.append(claim.next_need)
            return Grant(samples=5)

    it = started(Watched(), workers=3, ends=(4, 10, 40))
    for rank in range(3):
        it.claim(rank, 0, 0.0)
    assert seen == [10, 5, 0]


def test_a_pause_is_not_taken_for_a_step() -> None:
    """After a validation of 1000 s a grace of a tenth of a step is not 50 s."""
    it = started(Flexible(), workers=1, ends=(4, 8, 12, 16))
    for tick, now in enumerate((1.0, 2.0, 3.0, 1003.0)):
        it.push(0, granted(it.claim(0, tick, now - 1.0)).lease, now, tick=tick)
    assert it.step_s == 1.5


# --- early returns, hand-overs between epochs ---


def test_the_rest_of_an_early_return_is_issued_again() -> None:
    it = started(Saps(threshold=1, bound=3, chunk=4, micro=1), workers=2, ends=(16, 32))
    slow = granted(it.claim(1, 0, 0.0))
    assert slow.micro == 1 and not it.wants_return(slow.lease)
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.wants_return(slow.lease) and not it.wants_return(99)
    effects = it.push(1, slow.lease, 2.0, tick=0, samples=1)
    assert effects[:2] == [
        Accepted(rank=1, lease=slow.lease, samples=1, staleness=1),
        Reissued(rank=1, lease=slow.lease, samples=3, reason="returned early"),
    ]
    again = granted(it.claim(1, 0, 2.0))
    assert again.spans[0][0] == slow.spans[0][0] + 1
    assert not started(Asp()).wants_return(1)
    for count in (0, 5, -1):
        with pytest.raises(ValueError, match="give 1 to 4"):
            it.push(1, again.lease, 3.0, tick=0, samples=count)


def test_a_new_epoch_cancels_leases_and_answers_who_is_held() -> None:
    it = started(Bsp(), workers=2, ends=(4, 8))
    a, b = granted(it.claim(0, 0, 0.0)), granted(it.claim(1, 0, 0.0))
    it.push(0, a.lease, 1.0, tick=0)
    assert it.claim(0, 0, 1.0) == []
    assert it.begin(1, (6,), now=2.0) == [Passed(rank=0, tick=2)]
    assert (it.epoch, it.tick, it.ends, it.ledger.free) == (1, 0, (6,), 6)
    assert only(it.push(1, b.lease, 3.0, tick=0)).reason == "gone"  # type: ignore[union-attr]
    assert granted(it.claim(1, 0, 3.0)).samples == 3


def test_a_worker_that_asks_anew_abandons_its_lease() -> None:
    it = started(Asp(chunk=2))
    grant = granted(it.claim(0, 0, 0.0))
    effects = it.claim(0, 0, 1.0)
    assert isinstance(effects[0], Reissued) and granted(effects).spans == grant.spans
    assert it.ledger.leased == 2


def test_resume() -> None:
    it = started(Flexible(), ends=(8, 16, 24))
    for rank, seconds in ((0, 1.0), (1, 3.0)):
        it.push(rank, granted(it.claim(rank, 0, 0.0)).lease, seconds, tick=0)
    pooled = granted(it.claim(0, 1, 3.0))
    it.push(0, pooled.lease, 4.0, tick=1)
    state = json.loads(json.dumps(it.state_dict()))
    assert (state["version"], state["epoch"], state["tick"]) == (1, 0, 1)
    assert state["applied"] == [[0, 8]], "what is pooled but not applied is computed again"
    other = Coordinator(Flexible(), workers=range(2), predictor=Ewma(weight=0.5))
    other.load_state_dict(state)
    other.begin(0, (8, 16, 24), applied=[tuple(s) for s in state["applied"]], tick=state["tick"], now=0.0)
    assert (other.version, other.tick, other.ledger.arrived) == (1, 1, 8)
    assert other.predicted_s(1, 4) == it.predicted_s(1, 4) and other.shares() == it.shares() == (7, 1)
    assert granted(other.claim(0, 1, 0.0)).samples == 7
    stranger = Coordinator(Flexible(), workers=range(2))
    stranger.load_state_dict(state)  # of another predictor: speeds are learned anew
    assert math.isnan(stranger.predicted_s(0, 4)) and stranger.version == 1


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: Coordinator("flexible", workers=[0]), TypeError, "by_name"),  # type: ignore[arg-type]
        (lambda: Coordinator(Asp(), workers=[-1]), ValueError, "ranks"),
        (lambda: Coordinator(Asp(), workers=[0], ahead=-1), ValueError, "ahead=-1"),
        (lambda: Coordinator(Asp(), workers=[0], liveness_factor=1.0), ValueError, "liveness_factor=1.0"),
        (lambda: Coordinator(Asp(), workers=[0], liveness_s=0.0), ValueError, "liveness_s=0.0"),
        (lambda: Coordinator(Asp(), workers=[0], predictor="ewma"), TypeError, "Predictor"),  # type: ignore[arg-type]
        (lambda: Coordinator(Asp(), workers=[0]).claim(0, 0, 0.0), ValueError, "begin"),
        (lambda: started().claim(0, 1, 0.0), ValueError, "claims batch 1"),
        (lambda: started().begin(-1, (4,), now=0.0), ValueError, "epoch=-1"),
        (lambda: started().begin(1, (4, 4), now=0.0), ValueError, "strictly"),
        (lambda: started().begin(1, (4, 8), tick=3, now=0.0), ValueError, "tick=3"),
        (lambda: started().begin(1, (4, 8), applied=[(0, 7)], now=0.0), ValueError, "1 samples are left for 2"),
        (lambda: started().begin(1, (4, 8), applied=[(0, 7)], tick=2, now=0.0), ValueError, "not applied"),
    ],
)
def test_bad_input_is_refused(act: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        act()


# --- random schedules ---

RATES = st.sampled_from([0.05, 0.1, 0.1, 0.1, 0.2, 0.8, 2.0])
CHANCE = st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.4])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    workers = draw(st.integers(1, 5))
    epochs = []
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            sizes = [draw(st.integers(1, 40))] * draw(st.integers(1, 6))
            sizes[-1] = draw(st.integers(1, sizes[-1]))
        else:
            sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
        epochs.append(tuple(accumulate(sizes)))
    when = st.tuples(st.floats(0.0, 40.0), st.integers(0, workers - 1))
    return Case(
        ends=tuple(epochs),
        rates_s=tuple(draw(st.lists(RATES, min_size=workers, max_size=workers))),
        launch_s=draw(st.sampled_from([0.01, 0.5])),
        jitter=draw(st.sampled_from([0.0, 0.0, 0.2, 0.6])),
        nonfinite=draw(CHANCE),
        early=draw(CHANCE),
        give_back=draw(CHANCE),
        stall=draw(CHANCE),
        late=draw(CHANCE),
        deaths=tuple(draw(st.lists(when, max_size=3))),
        joins=tuple(draw(st.lists(when, max_size=3))),
        seed=draw(st.integers(0, 2**32 - 1)),
        ahead=draw(st.integers(0, 2)),
    )


def check(policy: Policy, case: Case) -> Books:
    """The promises themselves are asserted in `tests.pure.stale_random`, step by step."""
    return run(
        Coordinator(policy, workers=range(len(case.rates_s)), ahead=case.ahead, liveness_s=20.0), case
    )


@given(
    case=cases(),
    bound=st.integers(0, 3),
    grace=st.sampled_from([0.0, 0.1, 0.1, 0.5]),
    overlap=st.booleans(),
)
@settings(max_examples=1200)
def test_flexible_keeps_its_promises(case: Case, bound: int, grace: float, overlap: bool) -> None:
    books = check(Flexible(bound=bound, grace=grace, overlap=overlap and bound > 0), case)
    assert max(books.staleness, default=0) <= bound
    assert all(u.worth == 1.0 and u.ends_tick for epoch in books.updates for u in epoch)


@pytest.mark.parametrize(
    "make",
    [
        Bsp,
        Asp,
        lambda: Asp(damping="dynsgd", chunk=3),
        lambda: Ssp(bound=1),
        lambda: Drop(bound=2),
        Saps,
        lambda: Saps(threshold=1, bound=2, chunk=6, micro=1),
        Buffered,
        Backup,
        lambda: Backup(spares=0),
    ],
)
@given(case=cases())
@settings(max_examples=300)
def test_every_other_policy_keeps_its_promises(make: Callable[[], Policy], case: Case) -> None:
    policy = make()
    books = check(policy, case)
    bound = policy.bound_for(len(case.rates_s))
    assert bound is None or max(books.staleness, default=0) <= bound


@pytest.mark.parametrize("name", ["flexible", "bsp"])
@given(
    workers=st.integers(1, 5),
    chunk=st.integers(1, 20),
    ticks=st.integers(1, 6),
    last=st.floats(0.0, 1.0),
    rate_s=st.floats(0.01, 0.1),
    launch=st.floats(0.0, 20.0),
    ahead=st.integers(0, 3),
)
@settings(max_examples=150)
def test_with_equal_constant_speeds_every_update_is_exactly_its_batch(
    name: str, workers: int, chunk: int, ticks: int, last: float, rate_s: float, launch: float, ahead: int
) -> None:
    sizes = [workers * chunk] * ticks
    if ticks > 1:
        sizes[-1] = max(1, round(sizes[-1] * last))
    ends = tuple(accumulate(sizes))
    case = Case(ends=(ends,) * 3, rates_s=(rate_s,) * workers, launch_s=launch * rate_s, ahead=ahead)
    books = check(by_name(name), case)
    assert set(books.staleness) == {0}
    assert sum(books.refused.values()) == books.second_issues  # of an epoch's last, short batch, to idle workers
    for epoch in books.positions:
        assert epoch == [tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def test_flexible_waits_for_no_straggler() -> None:
    """Three equal workers and one 8 times slower: close to the speed of all hands, no wait beyond the grace."""
    ends = tuple(range(64, 64 * 40 + 1, 64))
    case = Case(ends=(ends, ends), rates_s=(0.1, 0.1, 0.1, 0.8), launch_s=0.1)
    books = check(Flexible(), case)
    ideal_s = 2 * ends[-1] / (3 / 0.1 + 1 / 0.8)
    assert books.now_s <= 1.15 * ideal_s
    assert books.longest_wait_s <= 0.1 * 1.2 * ideal_s / 80
    assert set(books.staleness) <= {0, 1, 2}
    assert sum(n for s, n in books.staleness.items() if s) <= 0.1 * 2 * ends[-1]
    slow = check(Bsp(), case)
    assert slow.now_s > 3.5 * books.now_s


def test_a_straggler_whose_speed_was_not_known_is_left_behind() -> None:
    """Its first chunk is as large as everybody's: the others fill in, and it comes late by no more than the bound."""
    case = Case(ends=((64, 128, 192, 256),), rates_s=(0.1, 0.1, 0.1, 0.8))
    books = check(Flexible(), case)
    assert books.longest_wait_s <= 0.1 * 0.1 * 20 + 1e-9
    assert max(books.staleness) >= 1 or books.reissued["stale"] == 1
    assert books.now_s < 16 * 0.8 + 8.0
