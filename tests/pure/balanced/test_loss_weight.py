"""`LossWeight`: with any parts, DDP's mean over ranks becomes the mean over the samples of the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.balanced.runtime.pieces import LossWeight
from lightning_hetero.data.batches import Part

SHARES = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


class Sums:
    """The ranks' common sum, known in advance; counts who asked and who waited."""

    def __init__(self, total: float = 0.0) -> None:
        self.total, self.started, self.waited = total, [], 0

    def sum_async(self, value: float) -> Callable[[], float]:
        self.started.append(value)

        def wait() -> float:
            self.waited += 1
            return self.total

        return wait


def part(shares: list[int], rank: int, base: float | None = None) -> Part:
    return Part(
        epoch=0,
        step=0,
        samples=shares[rank],
        shares=tuple(shares),
        weight_base=float(sum(shares)) if base is None else base,
    )


def weight(world: int, channel: Sums | None = None, **kwargs: Any) -> LossWeight:
    return LossWeight(channel=channel or Sums(), world_size=world, **kwargs)


def factors(shares: list[int], base: float | None = None, **kwargs: Any) -> list[float]:
    found = []
    for rank in range(len(shares)):
        one = weight(len(shares), **kwargs)
        one.open(part(shares, rank, base), batch=None)
        found.append(one.factor())
    return found


@given(SHARES, st.integers(0, 1000))
def test_mean_over_ranks_is_mean_over_samples(shares: list[int], seed: int) -> None:
    """Oracle: exact fractions. The local gradient is the mean of the rank's samples, anything on a dummy."""
    samples = [[(seed + 31 * r + 7 * i * i) % 19 - 9 for i in range(n)] for r, n in enumerate(shares)]
    local = [Fraction(sum(v), len(v)) if v else Fraction(7) for v in samples]
    ddp = sum(Fraction(f) * g for f, g in zip(factors(shares), local, strict=True)) / len(shares)
    true = Fraction(sum(map(sum, samples)), sum(shares))
    assert float(ddp) == pytest.approx(float(true), rel=1e-12, abs=1e-12)


def test_summed_loss_keeps_ddps_factor_and_drops_dummies() -> None:
    assert factors([5, 0, 2], reduction="sum") == [1.0, 0.0, 1.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_own_unit(tokens: list[float]) -> None:
    total = math.fsum(tokens)
    found = []
    for count in tokens:
        one = weight(len(tokens), Sums(total), batch_weight=lambda batch: batch["tokens"])
        one.open(part([3] * len(tokens), 0), {"tokens": count})
        found.append(one.factor())
        assert one.local == count
    expected = [len(tokens) * t / total if total else 0.0 for t in tokens]
    assert found == pytest.approx(expected, rel=1e-12)


def test_sum_is_started_at_once_and_waited_for_once() -> None:
    channel = Sums(10.0)
    one = weight(2, channel, batch_weight=float)
    one.open(part([3, 1], 0), 4.0)
    assert (channel.started, channel.waited) == ([4.0], 0)
    assert [one.factor(), one.factor()] == [0.8, 0.8]
    assert channel.waited == 1
    one.open(part([3, 1], 0), 5.0)  # the next batch has its own sum
    assert (one.factor(), channel.started, channel.waited) == (1.0, [4.0, 5.0], 2)


def test_dummy_weighs_nothing_and_is_not_shown_to_the_user() -> None:
    channel = Sums(10.0)

    def refuse(batch: Any) -> float:
        raise AssertionError(f"asked for the weight of a dummy: {batch}")

    one = weight(2, channel, batch_weight=refuse)
    one.open(part([0, 4], 0), "dummy")
    assert (one.factor(), one.local, channel.started) == (0.0, 0.0, [0.0])


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_weight(value: float) -> None:
    with pytest.raises(ValueError, match=r"batch_weight\(batch\)=.* must be a finite number >= 0"):
        weight(2, batch_weight=lambda batch: value).open(part([1, 1], 0), None)
