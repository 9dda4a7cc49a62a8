"""Policies as pure functions of what they are shown."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from lightning_hetero.stale.decide.policy import Apply, Bsp, Claim, Due, Flexible, Grant, Hold, Pool, Saps, Ssp, by_name
from lightning_hetero.types import AffineCost

NAMES = ("flexible", "saps", "asp", "bsp", "ssp")


def due(samples: int, in_s: float, *, rank: int = 1, current: bool = True) -> Due:
    return Due(rank=rank, samples=samples, in_s=in_s, current=current)


def claim(**changes: Any) -> Claim:
    """Worker 0 of 4 asks for work: batch of 64, steps of 10 s, 0.5 s per sample, nothing claimed yet."""
    values: dict[str, Any] = dict(
        rank=0, expired=False, first=False, late=False, opening=False, served=False, workers=4, batch=64, need=64,
        share=16, witnessed=False, due=(), reserved=(), lead=0, step_s=10.0,
        cost=AffineCost(fixed_s=1.0, per_sample_s=0.5),
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
    assert policy.claim(claim(due=(due(60, 5.0),))) == Grant(samples=4)
    assert policy.claim(claim(share=0)) == Grant(samples=1)


def test_flexible_holds_only_if_the_rest_comes_within_the_grace() -> None:
    policy = Flexible(grace=0.1)
    soon, later = due(64, 0.9), due(64, 1.1)
    assert policy.claim(claim(due=(soon,))) == Hold(patience_s=1.0)
    assert policy.claim(claim(due=(later,))) == Grant(samples=1)  # 1.1 s: only a sample, with 1 s to start it
    assert isinstance(policy.claim(claim(due=(soon,), expired=True)), Grant)
    assert isinstance(policy.claim(claim(due=(soon,), first=True)), Grant)
    assert isinstance(Flexible(grace=0.0).claim(claim(due=(due(64, 0.0),))), Grant)
    assert Flexible(grace=math.inf).claim(claim(due=(due(64, 800.0),))) == Hold()


def test_flexible_fills_in_what_ends_before_the_rest_arrives() -> None:
    fill = Flexible().claim(claim(due=(due(64, 6.0),)))
    assert fill == Grant(samples=10)  # 1 s + 10 * 0.5 s
    assert Flexible().claim(claim(due=(due(64, 50.0),))) == Grant(samples=16)  # never more than the share
    assert Flexible().claim(claim(due=(due(64, 6.0),), cost=None)) == Grant(samples=16)
    # held in vain: a part of what is missing
    assert Flexible().claim(claim(due=(due(64, 0.5),), need=9, expired=True)) == Grant(samples=3)


def test_flexible_takes_the_moment_when_enough_has_arrived() -> None:
    """Not the last chunk's: what comes after the batch is complete counts for the next."""
    chunks = (due(40, 0.5, rank=1), due(24, 0.8, rank=2), due(9, 50.0, rank=3))
    assert isinstance(Flexible().claim(claim(due=chunks)), Hold)
    # late chunks alone complete nothing: a chunk of this global step is needed, too
    chunks = (due(64, 0.5, current=False), due(5, 50.0, rank=2))
    assert isinstance(Flexible().claim(claim(due=chunks)), Grant)
    assert isinstance(Flexible().claim(claim(due=chunks, witnessed=True)), Hold)


def test_flexible_counts_workers_that_are_still_to_come_in_the_first_tick_only() -> None:
    coming = (due(48, 10.0),)
    assert Flexible().claim(claim(opening=True, reserved=coming, share=40)) == Grant(samples=16)
    assert Flexible().claim(claim(opening=False, reserved=coming, share=40)) == Grant(samples=40)


# --- barriers ---


def test_a_barrier_gives_everybody_its_part_once() -> None:
    policy = Bsp()
    others = (due(16, 10.0, rank=1), due(16, 10.0, rank=2))
    rest = (due(16, 10.0, rank=3),)
    assert policy.claim(claim(due=others, reserved=rest)) == Grant(samples=16)
    served = claim(served=True, need=48, due=others, reserved=rest)
    assert policy.claim(served) == Hold()
    # the part of a worker that died goes to the others, at most an equal share each
    assert policy.claim(claim(served=True, need=48, due=others)) == Grant(samples=16)
    assert policy.claim(claim(served=True, need=37, due=others)) == Grant(samples=5)
    # who cannot end this global step waits for the next
    assert policy.claim(claim(late=True, first=True)) == Hold()


# --- asynchronous ---


@pytest.mark.parametrize("name", ["asp", "saps", "ssp"])
def test_asynchronous_updates_are_worth_their_part_of_the_batch(name: str) -> None:
    policy = by_name(name)
    assert policy.update(pool(samples=24)) == Apply(worth=24 / 64, ends_step=False)
    assert policy.update(pool(samples=24, missing=0)) == Apply(worth=24 / 64)
    assert policy.update(pool(samples=24, missing=-2, witnessed=False)) == Apply(worth=24 / 64, ends_step=False)
    assert policy.update(pool(contributions=0, pushes=1, samples=0)) is None
    assert policy.update(pool(contributions=0, pushes=1, samples=0, missing=0)) == Apply(worth=0.0)


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


# --- all ---


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_arguments(name: str) -> None:
    policy = by_name(name)
    settings = policy.settings()
    assert settings.pop("name") == name
    again = by_name(name, **settings)
    assert again.settings() == policy.settings() == pickle.loads(pickle.dumps(policy)).settings()
    assert repr(again) == repr(policy) and repr(policy).startswith(type(policy).__name__ + "(")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: by_name("fast"), ValueError, "unknown policy 'fast': choose one of flexible, saps"),
        (lambda: Flexible(bound=-1), ValueError, "bound=-1"),
        (lambda: Flexible(bound=1.5), TypeError, "bound=1.5"),  # type: ignore[arg-type]
        (lambda: Flexible(bound=True), TypeError, "bound=True"),
        (lambda: Flexible(grace=-0.1), ValueError, "grace=-0.1"),
        (lambda: Flexible(grace=math.nan), ValueError, "grace=nan"),
        (lambda: by_name("asp", bound=2), ValueError, "no use for bound=2; drop it, or choose"),
        (lambda: Ssp(bound=-1), ValueError, "bound=-1"),
        (lambda: Saps(threshold=0), ValueError, "threshold=0"),
        (lambda: Saps(threshold=4, bound=4), ValueError, "must exceed threshold=4"),
        (lambda: Saps(micro=0), ValueError, "micro=0"),
    ],
)
def test_bad_settings_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        make()
