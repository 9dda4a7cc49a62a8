"""The coordinator when work is lost, late, issued twice or handed over, by hand-written sequences of events."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.stale.simulator import wants_return
from lightning_hetero.predictors import Ewma
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Assigned, Passed, Refused, Reissued
from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Policy, Saps, Ssp
from tests.pure.stale.kit import assigned, assigned_samples, kinds, only, over, started


def test_a_stalled_worker_loses_its_assignment_but_not_its_welcome() -> None:
    it = started(Flexible(), workers=2, ends=(8, 16))
    stopped, other = assigned(it.claim(0, 0, 0.0)), assigned(it.claim(1, 0, 0.0))
    assert it.wake_s() == 50.0, "nothing is known: ten times the limit"
    it.push(1, other.assignment, 1.0, global_step=0)
    assert it.wake(49.0) == [] and it.live == {0, 1}
    assert only(it.wake(50.0)) == Reissued(rank=0, assignment=stopped.assignment, samples=4, reason="stalled")
    assert it.live == {1} and it.shares() == (0, 8)
    again = assigned(it.claim(1, 0, 51.0))
    assert again.spans == stopped.spans
    assert only(it.push(0, stopped.assignment, 60.0, global_step=0)) == Refused(
        rank=0, assignment=stopped.assignment, samples=4, reason="gone"
    )
    assert it.live == {0, 1}
    assert it.speeds.predict_s(0, 4) == 50.0, "a stopped worker is not taken to be slower than the limit"
    # once speeds are known: ten times the prediction, at least five seconds
    it = started(Flexible(), workers=2, ends=(80, 160))
    it.push(0, assigned(it.claim(0, 0, 0.0)).assignment, 4.0, global_step=0)
    it.push(1, assigned(it.claim(1, 0, 0.0)).assignment, 4.0, global_step=0)
    assert assigned(it.claim(0, 1, 4.0)).samples == 40
    assert it.wake_s() == pytest.approx(44.0)
    it = started(Flexible(), workers=2, ends=(80, 160))
    it.push(0, assigned(it.claim(0, 0, 0.0)).assignment, 0.4, global_step=0)
    it.push(1, assigned(it.claim(1, 0, 0.0)).assignment, 0.4, global_step=0)
    it.claim(0, 1, 0.4)
    assert it.wake_s() == pytest.approx(5.4)


@pytest.mark.parametrize("policy", [Bsp(), Ssp(bound=0)], ids=str)
def test_nobody_waits_for_ever_for_a_worker_that_stops_between_two_chunks(policy: Policy) -> None:
    it = started(policy, workers=2, ends=(8, 16, 24))
    first = [assigned(it.claim(rank, 0, 0.0)) for rank in (0, 1)]
    for grant in first:
        it.push(grant.rank, grant.assignment, 1.0, global_step=0)
    now, global_step = 2.0, it.global_step
    assert global_step > 0
    effects = it.claim(0, global_step, now)  # worker 1 says nothing any more
    while effects and not over(it):
        now += 1.0
        if isinstance(grant := effects[-1], Assigned):
            it.push(0, grant.assignment, now, global_step=it.global_step)
        effects = it.claim(0, it.global_step, now)
    assert not over(it) and it.live == {0, 1}, "a barrier waits"
    assert it.wake_s() == pytest.approx(now + 50.0), "worker 0 waits since now"
    assert it.wake(now + 49.9) == [] and it.live == {0, 1}
    answers = [effect for effect in it.wake(now + 50.0) if isinstance(effect, Assigned | Passed)]
    assert [answer.rank for answer in answers] == [0] and it.live == {0}
    late = it.claim(1, global_step, now + 60.0)
    assert it.live == {0, 1} and all(isinstance(effect, Assigned | Passed) for effect in late)


def test_workers_that_are_slower_than_the_limit_are_not_refused_for_ever() -> None:
    it = started(Bsp(), workers=1, ends=(4, 8), liveness_s=0.2)
    now, refused = 0.0, 0
    while not over(it):
        grant = assigned(it.claim(0, it.global_step, now))
        while it.wake_s() < now + 30.0:
            it.wake(it.wake_s())
        now += 30.0
        refused += isinstance(it.push(0, grant.assignment, now, global_step=it.global_step)[0], Refused)
        assert refused < 8
    assert refused >= 1 and it.ledger.arrived == 8


# --- second issue ---


def end_of_epoch() -> tuple[Coordinator, Assigned, Assigned]:
    """The last global step: rank 0 is idle, rank 1 should have ended its four samples at 2 s."""
    it = started(Flexible(bound=9), ends=(8, 16))
    for rank in (0, 1):
        it.claim(rank, 0, 0.0)
    for rank in (0, 1):
        it.push(rank, rank + 1, 1.0, global_step=0)
    a, b = assigned(it.claim(0, 1, 1.0)), assigned(it.claim(1, 1, 1.0))
    assert it.ledger.free == 0 and a.samples == b.samples == 4
    it.push(0, a.assignment, 2.0, global_step=1)
    assert it.claim(0, 1, 2.0) == []
    assert it.wake_s() == pytest.approx(2.1)
    assert it.wake(2.1) == []  # the grace is over, but there is nothing to give
    assert it.wake_s() == pytest.approx(2.5)
    second = assigned(it.wake(it.wake_s()))
    assert second.rank == 0 and second.spans == b.spans
    assert assigned_samples(it) == 4
    assert sum(d.samples for d in it.workers.due(1, 2.5)) == 4, "each sample is expected once"
    return it, b, second


@pytest.mark.parametrize("original_first", [True, False])
def test_an_overdue_chunk_is_issued_a_second_time_and_the_first_result_wins(original_first: bool) -> None:
    it, original, second = end_of_epoch()
    first, other = (original, second) if original_first else (second, original)
    effects = it.push(first.rank, first.assignment, 3.0, global_step=1)
    assert kinds(effects) == ["Accepted", "Updated"] and over(it)
    assert only(it.push(other.rank, other.assignment, 3.1, global_step=1)) == Refused(
        rank=other.rank, assignment=other.assignment, samples=4, reason="gone"
    )
    assert it.ledger.arrived == 16


@pytest.mark.parametrize("original_first", [True, False])
def test_if_one_of_two_issues_fails_the_other_keeps_the_samples(original_first: bool) -> None:
    it, original, second = end_of_epoch()
    dead, other = (original, second) if original_first else (second, original)
    assert it.lost(dead.rank, 2.6) == [] and assigned_samples(it) == 4
    assert kinds(it.push(other.rank, other.assignment, 3.0, global_step=1)) == ["Accepted", "Updated"]


# --- early returns, hand-overs between epochs ---


def test_the_rest_of_an_early_return_is_issued_again() -> None:
    it = started(Saps(threshold=1, bound=3, micro=1), workers=2, ends=(8, 24))
    slow = assigned(it.claim(1, 0, 0.0))
    assert slow.micro == 1 and not wants_return(it, slow.assignment)
    it.push(0, assigned(it.claim(0, 0, 0.0)).assignment, 1.0, global_step=0)
    assert wants_return(it, slow.assignment) and not wants_return(it, 99)
    effects = it.push(1, slow.assignment, 2.0, global_step=0, samples=1)
    assert effects[:2] == [
        Accepted(rank=1, assignment=slow.assignment, samples=1, staleness=1),
        Reissued(rank=1, assignment=slow.assignment, samples=3, reason="returned early"),
    ]
    again = assigned(it.claim(1, 0, 2.0))
    assert again.spans[0][0] == slow.spans[0][0] + 1
    assert not wants_return(started(Asp()), 1)
    for count in (0, 5, -1):
        with pytest.raises(ValueError, match="give 1 to 4"):
            it.push(1, again.assignment, 3.0, global_step=0, samples=count)


def test_resume() -> None:
    it = started(Flexible(), ends=(8, 16, 24))
    it.speeds.learn(1, 4, 3.0)
    for rank, seconds in ((0, 1.0), (1, 3.0)):
        it.push(rank, assigned(it.claim(rank, 0, 0.0)).assignment, seconds, global_step=0)
    pooled = assigned(it.claim(0, 1, 3.0))
    it.push(0, pooled.assignment, 4.0, global_step=1)
    state = json.loads(json.dumps(it.state_dict()))
    assert (state["version"], state["epoch"], state["tick"]) == (1, 0, 1)
    assert state["applied"] == [[0, 8]], "what is pooled but not applied is computed again"
    other = Coordinator(Flexible(), workers=range(2), predictor=Ewma(weight=0.5))
    other.load_state_dict(state)
    other.begin(0, (8, 16, 24), applied=[tuple(s) for s in state["applied"]], global_step=state["tick"], now=0.0)
    assert (other.version, other.global_step, other.ledger.arrived) == (1, 1, 8)
    assert other.speeds.predict_s(1, 4) == it.speeds.predict_s(1, 4) and other.shares() == it.shares() == (7, 1)
    assert assigned(other.claim(0, 1, 0.0)).samples == 7
    stranger = Coordinator(Flexible(), workers=range(2))
    stranger.load_state_dict(state)  # of another predictor: speeds are learned anew
    assert math.isnan(stranger.speeds.predict_s(0, 4)) and stranger.version == 1


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: started().begin(-1, (4,), now=0.0), "epoch -1"),
        (lambda: started().begin(1, (), now=0.0), "epoch 1 with 0 batches"),
        (lambda: started().begin(1, (4, 4), now=0.0), "strictly"),
        (lambda: started().begin(1, (4, 8), global_step=3, now=0.0), "global_step=3 of 2"),
        (lambda: started().begin(1, (4, 8), applied=[(0, 7)], now=0.0), "1 samples are left"),
        (lambda: started().begin(1, (4, 8), applied=[(0, 7)], global_step=2, now=0.0), "does not belong"),
    ],
)
def test_bad_input_is_refused(act: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        act()
