"""The coordinator, each rule by a hand-written sequence of events: who gets what, when a batch is an update."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Effect,
    Passed,
    Refused,
    Reissued,
    Updated,
)
from lightning_hetero.stale.decide.policy import (
    Apply,
    Bsp,
    Claim,
    Flexible,
    Grant,
    Hold,
    Policy,
    Pooled,
    Ssp,
)
from tests.pure.stale.kit import Chunks, Hasty, granted, kinds, only, started
from tests.pure.stale.random_workers import Case, run


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
    for policy in (Flexible(grace=math.inf), Bsp(), Ssp(bound=0)):
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
    it = started(Chunks(2), workers=2, ends=(2, 4, 8))
    late, first = granted(it.claim(1, 0, 0.0)), granted(it.claim(0, 0, 0.0))
    assert isinstance(it.push(0, first.lease, 1.0, tick=0)[1], Updated) and it.tick == 1
    effects = it.push(1, late.lease, 2.0, tick=0)
    assert it.ledger.arrived == it.ends[1] and it.tick == 1
    assert effects[1].ends_step is False  # type: ignore[union-attr]
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
    it = started(Chunks(1), workers=2, ends=(1, 2))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.tick == 1
    late = granted(it.claim(1, 0, 2.0))
    assert late.spans == ()
    assert granted(it.claim(0, 1, 2.0)).samples == 1


# --- 3: room ---


def test_one_sample_per_later_tick_stays_unleased() -> None:
    it = started(Chunks(100), workers=3, ends=(4, 8, 12, 16))
    assert granted(it.claim(0, 0, 0.0)).samples == 13
    assert granted(it.claim(1, 0, 0.0)).spans == ()  # nothing may be leased: a dummy
    assert it.claim(1, 0, 0.1) == []
    effects = it.push(0, 1, 1.0, tick=0)
    assert effects[1] == Updated(
        version=1, tick=1, samples=13, contributions=effects[1].contributions, worth=13 / 4, ends_step=True
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
    it = started(Chunks(3), workers=2, ends=(8, 16))
    seen: list[tuple[float, bool, int]] = []
    while not it.over:
        effects = it.push(0, granted(it.claim(0, it.tick, 0.0)).lease, 1.0, tick=it.tick)
        seen += [(e.worth, e.ends_step, e.tick) for e in effects if isinstance(e, Updated)]
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
    it = started(Chunks(2, bound=1), workers=2, ends=(20, 40))
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
    it = started(Chunks(2, bound=1), workers=2, ends=(20, 40))
    slow = granted(it.claim(1, 0, 0.0))
    it.push(0, granted(it.claim(0, 0, 0.0)).lease, 1.0, tick=0)
    assert it.push(1, slow.lease, 2.0, tick=0)[0] == Accepted(rank=1, lease=slow.lease, samples=2, staleness=1)


def test_damping_scales_what_is_stale() -> None:
    it = started(Chunks(2, halved=True), workers=2, ends=(20, 40))
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
        return Hold(patience_s=1.0)


@pytest.mark.parametrize("policy", [Stubborn(), Forgetful()])
def test_whatever_a_policy_does_the_epoch_ends(policy: Policy) -> None:
    policy.holds = "barrier"  # type: ignore[misc]
    books = run(Coordinator(policy, workers=range(3)), Case(ends=((7, 9, 20),), rates_s=(0.1, 0.1, 0.8)))
    assert len(books.updates[0]) == 3




@pytest.mark.parametrize(
    ("verdict", "words"),
    [(Apply(), "carries samples over the end of the epoch"), (Apply(ends_step=False), "must end the global step")],
)
def test_an_update_that_breaks_a_rule_is_an_error(verdict: Apply, words: str) -> None:
    it = started(Hasty(verdict), ends=(2,))
    with pytest.raises(RuntimeError, match=words):
        for now in (0.0, 1.0):
            it.push(0, granted(it.claim(0, 0, now)).lease, now + 1.0, tick=0)


def test_what_is_missing_of_a_batch_that_ends_early_is_still_to_come() -> None:
    it = started(Hasty(Apply()), ends=(2, 4))
    first = granted(it.claim(0, 0, 0.0))
    it.claim(1, 0, 0.0)
    assert it.push(0, first.lease, 1.0, tick=0)[1:] == [
        Updated(
            version=1, tick=1, samples=1, ends_step=True,
            contributions=(Accepted(rank=0, lease=first.lease, samples=1, staleness=0),),
        )
    ]  # fmt: skip
    assert it.ends[1] - it.ledger.arrived == 3


def test_a_pause_is_not_taken_for_a_step() -> None:
    """After a validation of 1000 s a grace of a tenth of a step is not 50 s."""
    it = started(Flexible(), workers=1, ends=(4, 8, 12, 16))
    for tick, now in enumerate((1.0, 2.0, 3.0, 1003.0)):
        it.push(0, granted(it.claim(0, tick, now - 1.0)).lease, now, tick=tick)
    assert it.step_s == 1.5
