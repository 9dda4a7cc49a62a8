"""Policies as pure functions of what they are shown."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from lightning_hetero.stale.decide.policy import (
    Apply,
    Asp,
    Backup,
    Bsp,
    Buffered,
    Claim,
    DcAsgd,
    Drop,
    Due,
    DynSgd,
    Flexible,
    Grant,
    Hold,
    Policy,
    Pool,
    Quorum,
    Saps,
    Ssp,
    Wait,
    by_name,
)
from lightning_hetero.types import AffineCost

NAMES = (
    "flexible", "saps", "asp", "bsp", "ssp", "drop", "buffered", "backup", "dynsgd", "dc_asgd", "quorum",
)  # fmt: skip
ASYNCHRONOUS = ("saps", "asp", "ssp", "drop", "buffered", "dynsgd", "dc_asgd")


def due(samples: int, end_s: float, *, rank: int = 1, current: bool = True) -> Due:
    return Due(rank=rank, samples=samples, end_s=end_s, current=current)


def claim(**changes: Any) -> Claim:
    """At 100 s worker 0 of 4 asks for work: batch of 64, steps of 10 s, 0.5 s per sample, nothing claimed yet."""
    values: dict[str, Any] = dict(
        rank=0, now_s=100.0, since_s=100.0, expired=False, first=False, late=False, opening=False, served=False, tick=3,
        version=3, workers=4, batch=64, need=64, room=1000, share=16, witnessed=False, due=(), reserved=(),
        next_need=64, lead=0, step_s=10.0, cost=AffineCost(fixed_s=1.0, per_sample_s=0.5),
    )  # fmt: skip
    return Claim(**{**values, **changes})


def pool(**changes: Any) -> Pool:
    values: dict[str, Any] = dict(
        contributions=1, pushes=1, samples=16, batch=64, missing=48, witnessed=True, workers=4, slices=4
    )
    return Pool(**{**values, **changes})


# --- flexible ---


def test_flexible_gives_the_share_but_not_more_than_is_unclaimed() -> None:
    policy = Flexible()
    assert policy.claim(claim()) == Grant(samples=16)
    assert policy.claim(claim(due=(due(60, 105.0),))) == Grant(samples=4)
    assert policy.claim(claim(share=0)) == Grant(samples=1)


def test_flexible_holds_only_if_the_rest_comes_within_the_grace() -> None:
    policy = Flexible(grace=0.1)
    soon, later = due(64, 100.9), due(64, 101.1)
    assert policy.claim(claim(due=(soon,))) == Hold(until_s=101.0)
    assert policy.claim(claim(due=(soon,), since_s=99.5, now_s=100.2)) == Hold(until_s=100.5)
    assert policy.claim(claim(due=(later,))) == Grant(samples=1)  # 1.1 s: only a sample, with 1 s to start it
    assert isinstance(policy.claim(claim(due=(soon,), expired=True)), Grant)
    assert isinstance(policy.claim(claim(due=(soon,), first=True)), Grant)
    assert isinstance(Flexible(grace=0.0).claim(claim(due=(due(64, 100.0),))), Grant)
    assert Flexible(grace=math.inf).claim(claim(due=(due(64, 900.0),))) == Hold()


def test_flexible_fills_in_what_ends_before_the_rest_arrives() -> None:
    fill = Flexible().claim(claim(due=(due(64, 106.0),)))
    assert fill == Grant(samples=10)  # 1 s + 10 * 0.5 s
    assert Flexible().claim(claim(due=(due(64, 150.0),))) == Grant(samples=16)  # never more than the share
    assert Flexible().claim(claim(due=(due(64, 106.0),), cost=None)) == Grant(samples=16)
    # held in vain: a part of what is missing
    assert Flexible().claim(claim(due=(due(64, 100.5),), need=9, expired=True)) == Grant(samples=3)


def test_flexible_expects_an_overdue_chunk_in_three_times_its_delay() -> None:
    almost = due(64, 99.7)  # 0.3 s late: in 0.9 s
    assert almost.eta_s(100.0) == pytest.approx(100.9)
    assert isinstance(Flexible().claim(claim(due=(almost,))), Hold)
    assert isinstance(Flexible().claim(claim(due=(due(64, 99.6),))), Grant)
    assert due(64, math.nan).eta_s(100.0) == math.inf


def test_flexible_takes_the_moment_when_enough_has_arrived() -> None:
    """Not the last chunk's: what comes after the batch is complete counts for the next."""
    chunks = (due(40, 100.5, rank=1), due(24, 100.8, rank=2), due(9, 150.0, rank=3))
    assert isinstance(Flexible().claim(claim(due=chunks)), Hold)
    # late chunks alone complete nothing: a chunk of this tick is needed, too
    chunks = (due(64, 100.5, current=False), due(5, 150.0, rank=2))
    assert isinstance(Flexible().claim(claim(due=chunks)), Grant)
    assert isinstance(Flexible().claim(claim(due=chunks, witnessed=True)), Hold)


def test_flexible_never_holds_the_only_worker_in_the_tick() -> None:
    late = (due(70, 100.1, current=False),)
    assert Flexible(grace=9.0).claim(claim(due=late)) == Grant(samples=16)
    assert Flexible(grace=9.0).claim(claim(due=late, need=-3)) == Grant(samples=1)


def test_flexible_counts_workers_that_are_still_to_come_in_the_first_tick_only() -> None:
    coming = (due(48, 110.0),)
    assert Flexible().claim(claim(opening=True, reserved=coming, share=40)) == Grant(samples=16)
    assert Flexible().claim(claim(opening=False, reserved=coming, share=40)) == Grant(samples=40)


def test_flexible_with_overlap_works_ahead_instead() -> None:
    policy = Flexible(overlap=True)
    covered = claim(due=(due(64, 100.5),))
    assert policy.claim(covered) == Grant(samples=16)
    assert policy.claim(claim(due=(due(64, 100.5),), next_need=3)) == Grant(samples=3)
    assert isinstance(policy.claim(claim(due=(due(64, 100.5),), next_need=0)), Hold)


# --- barriers ---


@pytest.mark.parametrize("policy", [Bsp(), Backup(), Quorum(), Quorum(bound=0)])
def test_barriers_give_everybody_its_part_once(policy: Policy) -> None:
    others = (due(16, 110.0, rank=1), due(16, 110.0, rank=2))
    rest = (due(16, 110.0, rank=3),)
    assert policy.claim(claim(due=others, reserved=rest)) == Grant(samples=16)
    served = claim(served=True, need=48, due=others, reserved=rest)
    assert policy.claim(served) == Hold()
    # the part of a worker that died goes to the others, at most an equal share each
    assert policy.claim(claim(served=True, need=48, due=others)) == Grant(samples=16)
    assert policy.claim(claim(served=True, need=37, due=others)) == Grant(samples=5)
    # who cannot end this tick waits for the next
    assert policy.claim(claim(late=True, first=True)) == Hold()


def test_backup_does_not_wait_for_the_spares() -> None:
    policy = Backup(spares=1)
    assert policy.update(pool(pushes=2, contributions=2)) is None
    assert policy.update(pool(pushes=3, contributions=3)) == Apply(skip=True)
    assert policy.update(pool(pushes=3, witnessed=False)) is None
    assert policy.update(pool(pushes=2, missing=0)) == Apply(skip=True)
    assert policy.update(pool(pushes=2, workers=3)) == Apply(skip=True)
    assert Backup(spares=9).update(pool(pushes=1)) == Apply(skip=True)
    assert Backup(spares=0).update(pool(pushes=2, slices=2)) == Apply(skip=True)  # fewer samples than workers


def test_quorum_waits_for_more_than_half_and_a_window() -> None:
    policy = Quorum()  # of four: three, and a tenth of what they took

    def after(now_s: float, *in_s: float, **changes: Any) -> Apply | Wait | None:
        return policy.update(pool(now_s=now_s, began_s=100.0, in_s=in_s, **changes))

    assert after(150.0, 110.0, 115.0) is None
    assert after(120.0, 110.0, 115.0, 120.0) == Wait(until_s=122.0)
    assert after(121.9, 110.0, 115.0, 120.0) == Wait(until_s=122.0)
    assert after(122.0, 110.0, 115.0, 120.0) == Apply(carry=True)
    assert after(121.0, 110.0, 115.0, 120.0, missing=0) == Apply()  # all are in: nothing to wait for
    assert after(120.0, 110.0, 115.0, 120.0, missing=0, witnessed=False) is None
    assert after(150.0, 110.0, 115.0, 120.0, last=True) is None  # nothing comes after it that could take the rest
    assert after(140.0, 110.0, 120.0, workers=2) == Apply(carry=True)
    assert after(140.0, 110.0, slices=1) == Apply(carry=True)


def test_quorum_settings() -> None:
    some = pool(now_s=130.0, began_s=100.0, in_s=(110.0, 120.0))
    assert Quorum(quorum=2).update(some) == Apply(carry=True)
    assert Quorum(quorum=2, bound=0).update(some) == Apply(skip=True)
    assert Quorum(quorum=2, bound=0).update(pool(now_s=130.0, began_s=100.0, in_s=(110.0, 120.0), last=True)) == Apply(
        skip=True
    )
    assert Quorum(quorum=1, grace=0.0).update(pool(now_s=100.0, began_s=100.0, in_s=(100.0,))) == Apply(carry=True)
    assert Quorum(quorum=2, grace=1.0).update(some) == Wait(until_s=140.0)
    assert Quorum(quorum=2, grace=math.inf).update(some) is None
    assert Quorum(quorum=9).update(some) is None  # as many as there are: four


@pytest.mark.parametrize("policy", [Flexible(), Bsp()])
def test_pooled_policies_update_once_per_batch_at_full_worth(policy: Policy) -> None:
    assert policy.update(pool(missing=1)) is None
    assert policy.update(pool(missing=0, witnessed=False)) is None
    assert policy.update(pool(missing=0)) == policy.update(pool(missing=-7)) == Apply()


# --- asynchronous ---


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_updates_are_worth_their_part_of_the_batch(name: str) -> None:
    policy = by_name(name)
    k = policy.k if isinstance(policy, Buffered) else 1
    full = pool(contributions=k, pushes=k, samples=24)
    assert policy.update(full) == Apply(worth=24 / 64, ends_tick=False)
    assert policy.update(pool(contributions=k, pushes=k, samples=24, missing=0)) == Apply(worth=24 / 64)
    assert policy.update(pool(contributions=k, samples=24, missing=-2, witnessed=False)) == Apply(
        worth=24 / 64, ends_tick=False
    )
    assert policy.update(pool(contributions=0, pushes=1, samples=0)) is None
    assert policy.update(pool(contributions=0, pushes=1, samples=0, missing=0)) == Apply(worth=0.0)


def test_buffered_collects_k_contributions_or_the_end_of_the_batch() -> None:
    policy = Buffered(k=3)
    assert policy.update(pool(contributions=2)) is None
    assert policy.update(pool(contributions=2, missing=0)) == Apply(worth=0.25)


@pytest.mark.parametrize("name", ["asp", "drop", "saps", "buffered", "dynsgd", "dc_asgd"])
def test_asynchronous_workers_get_an_equal_chunk_and_never_wait(name: str) -> None:
    policy = by_name(name)
    for changes in ({}, {"due": (due(64, 100.1),)}, {"lead": 99}, {"need": -5}, {"share": 0}):
        answer = policy.claim(claim(**changes))
        assert isinstance(answer, Grant) and answer.samples == 16
    assert by_name(name, chunk=5).claim(claim()).samples == 5  # type: ignore[union-attr]


def test_ssp_holds_who_is_too_far_ahead_of_the_slowest() -> None:
    policy = Ssp(bound=3)
    assert policy.claim(claim(lead=3)) == Grant(samples=16)
    assert policy.claim(claim(lead=4)) == Hold()
    assert policy.claim(claim(lead=4, first=True)) == Grant(samples=16)


def test_saps_thresholds_exceed_the_natural_gap() -> None:
    for workers in range(1, 40):
        policy = Saps()
        threshold, bound = policy.threshold_for(workers), policy.bound_for(workers)
        assert threshold is not None and bound is not None
        assert threshold == math.ceil(max(workers, 1.5 * (workers - 1)))
        assert bound == max(workers + 2, 2 * (workers - 1)) > threshold > workers - 1
    assert Saps(threshold=9).bound_for(3) == 10
    assert Saps(bound=4).threshold_for(12) == 3
    assert Saps(micro=3).claim(claim()) == Grant(samples=16, micro=3)
    assert Saps().claim(claim()) == Grant(samples=16, micro=4)


@pytest.mark.parametrize(
    ("damping", "factors"),
    [
        (None, (1.0, 1.0, 1.0)),
        ("dynsgd", (1.0, 0.5, 1 / 9)),
        ("dynsgd_per_worker", (1.0, 0.8, 1 / 3)),
        ("delay_adaptive", (1.0, 1.0, 0.5)),
    ],
)
def test_damping(damping: str | None, factors: tuple[float, ...]) -> None:
    policy = by_name("asp", damping=damping)
    assert tuple(policy.scale(tau, 4) for tau in (0, 1, 8)) == pytest.approx(factors)


def test_dynsgd_is_the_damping_of_its_paper() -> None:
    policy, same = DynSgd(), Asp(damping="dynsgd")
    assert [policy.scale(tau, 4) for tau in range(5)] == [1 / (tau + 1) for tau in range(5)]
    assert [same.scale(tau, 4) for tau in range(5)] == [policy.scale(tau, 4) for tau in range(5)]
    assert repr(policy) == "DynSgd(chunk=None)"


def test_dc_asgd_has_a_limit() -> None:
    policy = DcAsgd()
    assert (policy.compensation, policy.correction_limit, policy.scale(9, 4)) == (0.5, 1.0, 1.0)
    assert DcAsgd(correction_limit=math.inf).correction_limit == Asp(compensation=0.5).correction_limit == math.inf


# --- all ---


def test_what_each_policy_claims() -> None:
    claims = {n: (p := by_name(n), p.claims_bound, p.claims_every_sample, p.holds)[1:] for n in NAMES}
    assert claims == {
        "flexible": (2, True, "grace"),
        "saps": (None, True, "never"),  # bound_for(workers)
        "asp": (None, True, "never"),
        "bsp": (0, True, "barrier"),
        "ssp": (None, True, "barrier"),
        "drop": (8, True, "never"),
        "buffered": (2, True, "never"),
        "backup": (0, False, "barrier"),
        "dynsgd": (None, True, "never"),
        "dc_asgd": (None, True, "never"),
        "quorum": (2, True, "barrier"),
    }
    assert not Quorum(bound=0).claims_every_sample


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_arguments(name: str) -> None:
    policy = by_name(name)
    settings = policy.settings()
    assert settings.pop("name") == name
    again = by_name(name, **settings)
    assert again.settings() == policy.settings() == pickle.loads(pickle.dumps(policy)).settings()
    assert repr(again) == repr(policy) and repr(policy).startswith(type(policy).__name__ + "(")


def test_compensation_is_carried_for_the_server() -> None:
    assert Flexible().compensation == Asp().compensation == 0.0
    assert Asp(compensation=0.5).compensation == by_name("drop", compensation=0.5).compensation == 0.5


@pytest.mark.parametrize("linear", [False, True])
def test_only_flexible_completes_by_itself_where_that_is_linear(linear: bool) -> None:
    completing = {name for name in NAMES if by_name(name).completes(linear=linear)}
    assert completing == ({"flexible"} if linear else set())
    assert by_name("flexible", late="complete").completes(linear=linear)
    assert not Flexible(late="join").completes(linear=linear)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: by_name("fast"), ValueError, "unknown policy 'fast': choose one of flexible, saps"),
        (lambda: Flexible(bound=-1), ValueError, "bound=-1"),
        (lambda: Flexible(bound=1.5), TypeError, "bound=1.5"),  # type: ignore[arg-type]
        (lambda: Flexible(bound=True), TypeError, "bound=True"),
        (lambda: Flexible(grace=-0.1), ValueError, "grace=-0.1"),
        (lambda: Flexible(grace=math.nan), ValueError, "grace=nan"),
        (lambda: Flexible(overlap=1), TypeError, "overlap=1"),  # type: ignore[arg-type]
        (lambda: Flexible(overlap=True, bound=0), ValueError, "use bound >= 1"),
        (lambda: Flexible(late="wait"), ValueError, "late='wait'.*'auto', 'join' or 'complete'"),  # type: ignore[arg-type]
        (lambda: Backup(spares=-1), ValueError, "spares=-1"),
        (lambda: Asp(damping="dc"), ValueError, "damping='dc'"),  # type: ignore[arg-type]
        (lambda: Asp(compensation=-1.0), ValueError, "compensation=-1.0"),
        (lambda: Asp(compensation=math.inf), ValueError, "compensation=inf"),
        (lambda: Drop(chunk=0), ValueError, "chunk=0"),
        (lambda: Drop(bound=-1), ValueError, "bound=-1"),
        (lambda: Ssp(bound=-1), ValueError, "bound=-1"),
        (lambda: Saps(threshold=0), ValueError, "threshold=0"),
        (lambda: Saps(threshold=4, bound=4), ValueError, "must exceed threshold=4"),
        (lambda: Saps(micro=0), ValueError, "micro=0"),
        (lambda: Buffered(k=0), ValueError, "k=0"),
        (lambda: Buffered(bound=-1), ValueError, "bound=-1"),
        (lambda: DynSgd(chunk=0), ValueError, "DynSgd(chunk=0"),
        (lambda: DcAsgd(compensation=math.inf), ValueError, "DcAsgd(compensation=inf"),
        (lambda: DcAsgd(correction_limit=-1.0), ValueError, "correction_limit=-1.0"),
        (lambda: DcAsgd(correction_limit=math.nan), ValueError, "correction_limit=nan"),
        (lambda: DcAsgd(correction_limit="1"), ValueError, "correction_limit='1'"),  # type: ignore[arg-type]
        (lambda: Quorum(quorum=0), ValueError, "quorum=0"),
        (lambda: Quorum(grace=-1.0), ValueError, "grace=-1.0"),
        (lambda: Quorum(grace=True), ValueError, "grace=True"),
        (lambda: Quorum(bound=1.0), TypeError, "bound=1.0"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        make()
