"""The coordinator when work is lost, late, issued twice or handed over, by hand-written sequences of events."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_hetero.predictors import Ewma
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import (
    Accepted,
    Granted,
    Passed,
    Refused,
    Reissued,
)
from lightning_hetero.stale.decide.policy import (
    Asp,
    Bsp,
    Claim,
    Flexible,
    Grant,
    Hold,
    Policy,
    Saps,
    Ssp,
)
from tests.pure.stale.kit import Chunks, granted, kinds, only, started


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
    assert it.speeds.predict_s(0, 4) == 50.0, "a stopped worker is not taken to be slower than the limit"
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


@pytest.mark.parametrize("policy", [Bsp(), Ssp(bound=0)], ids=str)
def test_nobody_waits_for_ever_for_a_worker_that_stops_between_two_chunks(policy: Policy) -> None:
    it = started(policy, workers=2, ends=(8, 16, 24), liveness_factor=10.0, liveness_s=5.0)
    first = [granted(it.claim(rank, 0, 0.0)) for rank in (0, 1)]
    for grant in first:
        it.push(grant.rank, grant.lease, 1.0, tick=0)
    now, tick = 2.0, it.tick
    assert tick > 0
    effects = it.claim(0, tick, now)  # worker 1 says nothing any more
    while effects and not it.over:
        now += 1.0
        if isinstance(grant := effects[-1], Granted):
            it.push(0, grant.lease, now, tick=it.tick)
        effects = it.claim(0, it.tick, now)
    assert not it.over and it.live == {0, 1}, "a barrier waits"
    assert it.wake_s() == pytest.approx(now + 50.0), "worker 0 waits since now"
    assert it.wake(now + 49.9) == [] and it.live == {0, 1}
    answers = [effect for effect in it.wake(now + 50.0) if isinstance(effect, Granted | Passed)]
    assert [answer.rank for answer in answers] == [0] and it.live == {0}
    late = it.claim(1, tick, now + 60.0)
    assert it.live == {0, 1} and all(isinstance(effect, Granted | Passed) for effect in late)


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


class OneByOne(Ssp):
    def claim(self, claim: Claim) -> Grant | Hold:
        answer = super().claim(claim)
        return Grant(samples=1) if isinstance(answer, Grant) else answer


def test_a_worker_that_joins_is_not_behind_those_that_were_there() -> None:
    it = started(OneByOne(bound=1), workers=1, ends=(20, 40))
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
    assert sum(d.samples for d in it.workers.due(1, 2.5)) == 4, "each sample is expected once"
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


# --- early returns, hand-overs between epochs ---


def test_the_rest_of_an_early_return_is_issued_again() -> None:
    it = started(Saps(threshold=1, bound=3, micro=1), workers=2, ends=(8, 24))
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
    it = started(Chunks(2))
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
    assert other.speeds.predict_s(1, 4) == it.speeds.predict_s(1, 4) and other.shares() == it.shares() == (7, 1)
    assert granted(other.claim(0, 1, 0.0)).samples == 7
    stranger = Coordinator(Flexible(), workers=range(2))
    stranger.load_state_dict(state)  # of another predictor: speeds are learned anew
    assert math.isnan(stranger.speeds.predict_s(0, 4)) and stranger.version == 1


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
