"""The coordinator, each rule by a hand-written sequence of events: who gets what, when a batch is an update."""

from __future__ import annotations

import pytest

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Effect, Passed, Refused, Reissued, Updated
from lightning_hetero.stale.decide.policy import Apply, Bsp, Claim, Flexible, Grant, Hold, Policy, Pooled
from tests.pure.stale.kit import Chunks, Hasty, assigned, assigned_samples, kinds, only, over, started
from tests.pure.stale.random_workers import Case, run


def test_a_rank_that_comes_when_the_epoch_is_over_still_gets_one_step() -> None:
    it = started(ends=(4,), workers=2)
    first = assigned(it.claim(0, 0, 0.0))
    it.push(0, first.assignment, 1.0, global_step=0)
    for now in (5.0, 7.0):  # rank 1 does not come: its part is done by rank 0, in top-ups
        filled = assigned(it.claim(0, 0, now))
        effects = it.push(0, filled.assignment, now + 1.0, global_step=0)
    assert isinstance(effects[-1], Updated) and over(it)
    dummy = assigned(it.claim(1, 0, 9.0))
    assert dummy.spans == () and dummy.samples == 0 and dummy.global_step == 1
    assert only(it.claim(1, 0, 9.5)) == Passed(rank=1, global_step=1)


def test_a_rank_that_is_late_into_the_epoch_is_granted_samples_of_the_present_step() -> None:
    it = started(ends=(4, 8, 40))
    for global_step in (0, 1):
        while it.global_step == global_step:
            now = 10.0 * (global_step + 1)
            it.push(0, assigned(it.claim(0, global_step, now)).assignment, now + 1.0, global_step=global_step)
    late = assigned(it.claim(1, 0, 30.0))
    assert late.samples >= 1 and late.global_step == 2 and late.base == it.version
    assert only(it.claim(1, 0, 30.5)[-1:]) == Passed(rank=1, global_step=2)  # the second claim is like any other


# --- the witness ---


def test_late_contributions_alone_never_end_a_step() -> None:
    it = started(Chunks(2), workers=2, ends=(2, 4, 8))
    late, first = assigned(it.claim(1, 0, 0.0)), assigned(it.claim(0, 0, 0.0))
    assert isinstance(it.push(0, first.assignment, 1.0, global_step=0)[1], Updated) and it.global_step == 1
    effects = it.push(1, late.assignment, 2.0, global_step=0)
    assert it.ledger.arrived == it.ends[1] and it.global_step == 1
    assert effects[1].ends_step is False  # type: ignore[union-attr]
    in_step = assigned(it.claim(0, 1, 2.0))
    it.push(0, in_step.assignment, 3.0, global_step=1)
    assert it.global_step == 2
    # the same with a policy that pools: no update at all before somebody in the global step has contributed
    it = started(Hasty(), workers=2, ends=(1, 2, 4))
    late, first = assigned(it.claim(1, 0, 0.0)), assigned(it.claim(0, 0, 0.0))
    it.push(0, first.assignment, 1.0, global_step=0)
    assert kinds(it.push(1, late.assignment, 2.0, global_step=0)) == ["Accepted"]
    in_step = assigned(it.claim(1, 1, 2.0))
    assert kinds(it.push(1, in_step.assignment, 3.0, global_step=1)) == ["Accepted", "Updated"]


# --- room ---


def test_one_sample_per_later_step_stays_unassigned() -> None:
    it = started(Chunks(100), workers=3, ends=(4, 8, 12, 16))
    assert assigned(it.claim(0, 0, 0.0)).samples == 13
    assert assigned(it.claim(1, 0, 0.0)).spans == ()  # nothing may be assigned: a dummy
    assert it.claim(1, 0, 0.1) == []
    effects = it.push(0, 1, 1.0, global_step=0)
    assert effects[1] == Updated(
        version=1, global_step=1, samples=13, contributions=effects[1].contributions, worth=13 / 4, ends_step=True
    )  # type: ignore[union-attr]
    for global_step in (1, 2, 3):
        grant = assigned(it.claim(0, global_step, float(global_step)))
        assert grant.samples == 1
        it.push(0, grant.assignment, global_step + 0.5, global_step=global_step)
    assert over(it) and it.version == 4


# --- when the pool becomes an update ---


def test_an_update_comes_when_the_cumulative_count_is_reached_and_a_surplus_counts_for_the_next() -> None:
    it = started(Flexible(), workers=2, ends=(8, 16, 24))
    a, b = assigned(it.claim(0, 0, 0.0)), assigned(it.claim(1, 0, 0.0))
    assert (a.spans, b.spans) == (((0, 4),), ((4, 8),))
    it.push(0, a.assignment, 1.0, global_step=0)
    assert it.claim(0, 0, 1.0) == []
    fill = assigned(it.wake(it.wake_s()))
    accepted = Accepted(rank=0, assignment=3, samples=fill.samples, staleness=0)
    assert it.push(0, fill.assignment, 1.5, global_step=0)[0] == accepted
    assert it.ledger.arrived == 4 + fill.samples
    effects = it.push(1, b.assignment, 2.0, global_step=0)
    updated = effects[1]
    assert isinstance(updated, Updated)
    assert (updated.version, updated.global_step, updated.samples, updated.worth) == (1, 1, 8 + fill.samples, 1.0)
    assert [c.rank for c in updated.contributions] == [0, 0, 1]
    assert it.ends[1] - it.ledger.arrived == 8 - fill.samples, "the surplus is part of the next batch"


# --- not finite ---


def test_gradients_that_are_not_finite_use_up_their_samples_and_witness_the_step() -> None:
    it = started(Bsp(), workers=2, ends=(4, 8))
    assignments = [assigned(it.claim(r, 0, 0.0)) for r in range(2)]
    assert only(it.push(0, assignments[0].assignment, 1.0, global_step=0, finite=False)) == Refused(
        rank=0, assignment=assignments[0].assignment, samples=2, reason="nonfinite"
    )
    effects = it.push(1, assignments[1].assignment, 1.0, global_step=0, finite=False)
    assert effects[1] == Updated(version=1, global_step=1, samples=0, contributions=())
    assert it.ledger.arrived == 4, "computed again they would not be finite again"


# --- stale ---


def test_what_is_too_old_is_issued_again_at_once_and_refused_when_it_comes() -> None:
    it = started(Chunks(2, bound=1), workers=2, ends=(20, 40))
    slow = assigned(it.claim(1, 0, 0.0))
    effects: list[Effect] = []
    for _ in range(2):
        effects = it.push(0, assigned(it.claim(0, 0, 0.0)).assignment, 1.0, global_step=0)
    assert it.version == 2
    assert effects[-1] == Reissued(rank=1, assignment=slow.assignment, samples=2, reason="stale")
    assert assigned_samples(it) == 0
    assert only(it.push(1, slow.assignment, 2.0, global_step=0)) == Refused(
        rank=1, assignment=slow.assignment, samples=2, reason="stale"
    )
    assert assigned(it.claim(1, 0, 2.0)).base == 2


def test_damping_scales_what_is_stale() -> None:
    it = started(Chunks(2, halved=True), workers=2, ends=(20, 40))
    slow = assigned(it.claim(1, 0, 0.0))
    it.push(0, assigned(it.claim(0, 0, 0.0)).assignment, 1.0, global_step=0)
    assert it.push(1, slow.assignment, 2.0, global_step=0)[0] == Accepted(
        rank=1, assignment=slow.assignment, samples=2, staleness=1, scale=0.5
    )


# --- hints ---


def test_grants_carry_the_slice_that_comes_next() -> None:
    it = started(Bsp(), workers=2, ends=(4, 8, 12), ahead=1)
    a, b = assigned(it.claim(0, 0, 0.0)), assigned(it.claim(1, 0, 0.0))
    assert (a.spans, a.hint, b.spans, b.hint) == (((0, 2),), (4, 6), ((2, 4),), (6, 8))
    it.push(0, a.assignment, 1.0, global_step=0)
    it.push(1, b.assignment, 1.0, global_step=0)
    assert assigned(it.claim(1, 1, 1.0)).spans == (b.hint,)
    it = started(Bsp(), workers=2, ends=(4, 8, 12))
    assert assigned(it.claim(0, 0, 0.0)).hint == (0, 0)


def test_slices_that_may_have_been_fetched_survive_small_changes_of_speed() -> None:
    for seconds, share in ((1.05, 16), (2.0, 11)):
        it = started(Flexible(), workers=2, ends=(32, 64, 96), ahead=1)
        it.speeds.learn(1, 16, seconds)  # one chunk may have been a hiccup
        a, b = assigned(it.claim(0, 0, 0.0)), assigned(it.claim(1, 0, 0.0))
        it.push(0, a.assignment, 1.0, global_step=0)
        it.push(1, b.assignment, seconds, global_step=0)
        fast = assigned(it.claim(0, 1, seconds))
        assert fast.samples == 32 - share and fast.spans[0] == a.hint
        assert it.ledger.free_in_slice(1, 1) == 16, "who takes more takes it from later batches"
        grant = assigned(it.claim(1, 1, seconds))
        assert grant.samples == share and grant.spans[0][0] == b.hint[0]


# --- nobody waits without end ---


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
            it.push(0, assigned(it.claim(0, 0, now)).assignment, now + 1.0, global_step=0)


def test_a_pause_is_not_taken_for_a_step() -> None:
    """After a validation of 1000 s a grace of a tenth of a step is not 50 s."""
    it = started(Flexible(), workers=1, ends=(4, 8, 12, 16))
    for global_step, now in enumerate((1.0, 2.0, 3.0, 1003.0)):
        it.push(0, assigned(it.claim(0, global_step, now - 1.0)).assignment, now, global_step=global_step)
    assert it.state_dict()["step_s"] == 1.5
