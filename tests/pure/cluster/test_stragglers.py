"""The search for stragglers: nobody by mistake, and who is slow soon, by the work and not by the samples."""

from __future__ import annotations

import math
import random

import pytest

from lightning_hetero.cluster.score import Straggler, StragglerTest
from lightning_hetero.types import SpeedSample


def steps_of(
    seed: int, world: int, noise: float, *, steps: int = 1000, hiccups: float = 0.0, fixed_s: float = 0.0
) -> list[list[SpeedSample]]:
    """Records of equal devices: log-normal work and noise, and some steps three times as long."""
    g = random.Random(seed)
    records: list[list[SpeedSample]] = []
    for step in range(steps):
        row: list[SpeedSample] = []
        for rank in range(world):
            work = g.lognormvariate(6.0, 0.8)
            compute_s = (fixed_s + 1e-4 * work) * math.exp(g.gauss(0.0, noise))
            compute_s *= 3.0 if g.random() < hiccups else 1.0
            row.append(SpeedSample(rank=rank, step=step, samples=8, compute_s=compute_s, work=work))
        records.append(row)
    return records


def slowed(row: list[SpeedSample], rank: int, factor: float) -> list[SpeedSample]:
    return [
        SpeedSample(rank=r.rank, step=r.step, samples=r.samples, compute_s=r.compute_s * factor, work=r.work)
        if r.rank == rank
        else r
        for r in row
    ]


def found_in(rows: list[list[SpeedSample]]) -> list[tuple[int, Straggler]]:
    test = StragglerTest(len(rows[0]))
    return [(i, one) for i, row in enumerate(rows) for one in test.add(row, epoch=0, step=i)]


@pytest.mark.parametrize(
    ("world", "noise", "hiccups", "fixed_s"),
    [(2, 0.05, 0, 0), (2, 0.07, 0, 0), (2, 0.4, 0, 0), (2, 0.03, 0.02, 0), (4, 0.1, 0.02, 0), (4, 0.05, 0, 0.01)],
)
def test_equal_devices_give_no_false_alarm_in_1000_steps(
    world: int, noise: float, hiccups: float, fixed_s: float
) -> None:
    """Whatever the noise; with a step of 2 % three times as long; with a fixed time of a quarter of the mean work's."""
    for seed in range(12):
        assert found_in(steps_of(seed, world, noise, hiccups=hiccups, fixed_s=fixed_s)) == []


@pytest.mark.parametrize(("world", "noise"), [(2, 0.02), (2, 0.06), (4, 0.08), (8, 0.09)])
@pytest.mark.parametrize("begin", [0, 60])
@pytest.mark.short("60-2-0.06", "0-8-0.09")
def test_a_slowdown_of_1_3_is_found_within_20_steps_in_99_of_100_trials(world: int, noise: float, begin: int) -> None:
    """With times that scatter by 6 % (standard deviation) on two ranks, where the other's adds to it, by 9 % on 8."""
    trials, late = 200, 0
    for seed in range(trials):
        rows = steps_of(seed, world, noise, steps=begin + 20)
        found = found_in([row if i < begin else slowed(row, 1, 1.3) for i, row in enumerate(rows)])
        assert all(one.rank == 1 for _, one in found)
        late += not found
    assert late <= trials / 100


def test_the_line_has_since_when_and_by_how_much() -> None:
    rows = steps_of(3, 4, 0.03, steps=260)
    ((at, one),) = found_in([row if i < 200 else slowed(row, 2, 1.5) for i, row in enumerate(rows)])
    assert one.rank == 2 and one.step == pytest.approx(200, abs=1) and 200 < at < 213
    assert one.slowdown == pytest.approx(1.5, rel=0.05)


def test_a_spell_of_a_few_steps_names_nobody() -> None:
    rows = steps_of(7, 2, 0.03, steps=300)
    assert found_in([slowed(row, 1, 3.0) if i % 60 in range(40, 46) else row for i, row in enumerate(rows)]) == []


def test_it_is_the_work_that_counts() -> None:
    """Half the samples in the same time are a slow device, unless they are as much work."""

    def row(work: tuple[float, float]) -> list[SpeedSample]:
        return [
            SpeedSample(rank=r, step=0, samples=n, compute_s=0.1, work=w)
            for r, (n, w) in enumerate(zip((8, 4), work, strict=True))
        ]

    assert found_in([row((800.0, 800.0))] * 40) == []
    assert [one.rank for _, one in found_in([row((8.0, 4.0))] * 40)] == [1]
    assert [one.rank for _, one in found_in([row((math.nan, math.nan))] * 40)] == [1]  # then samples count


def test_what_was_not_measured_is_no_evidence() -> None:
    rows = [
        [
            SpeedSample(rank=0, step=i, samples=8, compute_s=0.1),
            SpeedSample(rank=1, step=i, samples=8, compute_s=0.3 if i % 10 == 0 else 0.0),
        ]
        for i in range(40)
    ]
    assert found_in(rows[:30]) == []
    assert StragglerTest(1).add(rows[0][:1], epoch=0, step=0) == []
