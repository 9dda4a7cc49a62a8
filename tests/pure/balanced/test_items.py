"""Work is items, not samples: to the policy, and to the search for stragglers, a long batch is no slow device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cluster.score import StragglerTest
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.items import WorkPerSample
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import SpeedSample

BATCH, FIXED_S, PER_TOKEN_S = 64, 2e-3, 5e-6


def record(rank: int, samples: int, work: float = math.nan, compute_s: float = 0.1) -> SpeedSample:
    return SpeedSample(rank=rank, step=0, samples=samples, compute_s=compute_s, work=work)


# ---- work in samples -------------------------------------------------------------------------------------------


def in_samples(work: WorkPerSample, records: list[SpeedSample]) -> list[float]:
    return work.in_samples([r.samples for r in records], [r.work for r in records])


@given(st.lists(st.lists(st.integers(1, 5000), min_size=3, max_size=3), min_size=1, max_size=150))
def test_work_that_is_samples_is_exactly_samples(steps: list[list[int]]) -> None:
    """So nothing changes, not by a bit, where nobody counts work; nor where it is not known."""
    counted, unknown = WorkPerSample(), WorkPerSample()
    for step in steps:
        records = [record(rank, n, float(n)) for rank, n in enumerate(step)]
        blank = [record(rank, n) for rank, n in enumerate(step)]
        counted.add(records)
        unknown.add(blank)
        assert in_samples(counted, records) == in_samples(unknown, blank) == [float(n) for n in step]


# ---- in a loop of policy and devices ---------------------------------------------------------------------------


@dataclass
class Course:
    """Times of the slowest rank per step, under the policy's shares and under equal ones, and what else happened."""

    policy_s: list[float] = field(default_factory=list[float])
    equal_s: list[float] = field(default_factory=list[float])
    shares: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    compute_s: list[list[float]] = field(default_factory=list[list[float]])
    urgent: int = 0
    stragglers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # step, rank

    @property
    def ratio(self) -> float:
        return math.fsum(self.policy_s) / math.fsum(self.equal_s)

    def moved_after(self, step: int) -> int:
        """Steps from ``step`` until shares are others than before it."""
        return next(i for i, shares in enumerate(self.shares[step:]) if shares != self.shares[step - 1])


def train(
    slow: tuple[float, ...],
    *,
    steps: int,
    seed: int,
    counted: bool = True,
    noise: float = 0.03,
    slower: tuple[int, int, float] | None = None,
    padded: bool = True,
    make: Callable[[], BalancePolicy] = BalancePolicy,
) -> Course:
    """Simulated ranks on texts of log-normal length (the longest of 64 is some seven times the median).

    Args:
        slow: time of each rank for the same work.
        steps, seed: of the run.
        counted: whether the policy is told the work.
        noise: relative, of each time.
        slower: (rank, step, factor): from this step on.
        padded: a part costs its longest text times its texts, else the sum of their lengths.
        make: the policy.
    """
    rng, course, world = np.random.default_rng(seed), Course(), len(slow)
    policy, test = make(), StragglerTest(world)
    policy.start(world_size=world, total=BATCH, bounds=ShareBounds())
    equal = policy.shares

    def tokens_of(lengths: np.ndarray, shares: tuple[int, ...]) -> list[float]:
        parts = np.split(lengths, np.cumsum(shares)[:-1])
        return [float(part.max() * len(part) if padded else part.sum()) for part in parts]

    for step in range(steps):
        lengths, shares = rng.lognormal(5, 0.8, BATCH), policy.shares
        factors = [k * (1 + noise * float(rng.standard_normal())) for k in slow]
        if slower is not None and step >= slower[1]:
            factors[slower[0]] *= slower[2]

        def seconds(
            of: tuple[int, ...], lengths: np.ndarray = lengths, factors: list[float] = factors
        ) -> list[float]:
            work = tokens_of(lengths, of)
            return [k * (FIXED_S + PER_TOKEN_S * w) for k, w in zip(factors, work, strict=True)]

        compute_s = seconds(shares)
        work = tokens_of(lengths, shares) if counted else [float(n) for n in shares]
        records = [
            SpeedSample(rank=r, step=step, samples=n, compute_s=s, work=w)
            for r, (n, s, w) in enumerate(zip(shares, compute_s, work, strict=True))
        ]
        course.urgent += policy.urgent(policy.work_in_samples(records), compute_s)
        policy.observe(records)
        course.policy_s.append(max(compute_s))
        course.equal_s.append(max(seconds(equal)))
        course.shares.append(shares)
        course.compute_s.append(compute_s)
        course.stragglers += [(step, found.rank) for found in test.add(records, epoch=0, step=step)]
    return course


@pytest.mark.parametrize("world", [2, 4])
def test_on_equal_devices_texts_of_all_lengths_move_no_shares_and_make_no_straggler(world: int) -> None:
    """1,000 steps: no false alarm, and steps no longer than those of equal shares, which are stock DDP's."""
    for seed in range(3):
        course = train((1.0,) * world, steps=1000, seed=seed)
        assert course.stragglers == []
        assert course.ratio < 1.005
        assert len(set(course.shares)) == 1


def test_a_device_that_gets_slower_is_found_within_20_steps_of_skewed_texts() -> None:
    for seed in range(20):
        course = train((1.0, 1.0), steps=160, seed=seed, slower=(1, 120, 1.3))
        (step, rank), *more = course.stragglers
        assert rank == 1 and 120 <= step < 140 and not more


@pytest.mark.parametrize(("padded", "most"), [(True, 0.62), (False, 0.5)])
def test_unequal_devices_are_balanced(padded: bool, most: float) -> None:
    """Without padding, fixed time and variance the ideal is 1 / (1 + 1 + 1/2 + 1/4) = 0.36."""
    for seed in range(3):
        assert train((1.0, 1.0, 2.0, 4.0), steps=300, seed=seed, padded=padded).ratio < most
