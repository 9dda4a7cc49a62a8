"""Whether the first choice is still right, by the steps trained since."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lightning_hetero.auto.choice import ENGINES, choose
from lightning_hetero.auto.second_look import SecondLook
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import AffineCost, SpeedSample, StepReport

RANKS, BATCH = 4, 64


def look(refused: dict[str, str] | None = None) -> SecondLook:
    """What follows a trial that has seen four equal, steady devices."""
    costs = (AffineCost(fixed_s=0.002, per_sample_s=0.001),) * RANKS
    setup = Setup(cluster=equal_cluster(RANKS), global_batch=BATCH, costs=costs, exchange_s=0.002, own_s=0.001)
    first = choose(setup, ENGINES, {})
    assert first.engine == "balanced"
    return SecondLook(first, ENGINES, refused or {})


def report(step: int, times_s: Sequence[float]) -> StepReport:
    records = tuple(
        SpeedSample(rank=r, step=step, samples=BATCH // RANKS, compute_s=s, wait_s=max(times_s) - s + 0.002)
        for r, s in enumerate(times_s)
    )
    return StepReport(epoch=0, step=step, records=records, predicted_s=(math.nan,) * RANKS)


def spells(step: int) -> list[float]:
    """In every other step another rank takes eight times as long."""
    return [0.018 * (8.0 if step % 2 == 0 and step // 2 % RANKS == rank else 1.0) for rank in range(RANKS)]


def test_steps_as_in_the_trial_change_nothing() -> None:
    second = look()
    for step in range(64):
        second.note(report(step, [0.018] * RANKS))
    assert second.choose() is None


def test_lasting_differences_are_the_balanced_engines_own() -> None:
    second = look()
    for step in range(64):
        second.note(report(step, [0.018, 0.018, 0.018, 0.054]))
    assert second.choose() is None


def test_spells_that_the_trial_did_not_meet_are_the_stale_engines() -> None:
    second = look()
    for step in range(64):
        second.note(report(step, spells(step)))
    found = second.choose()
    assert found is not None and found.engine == "stale" and found.plan is not None and found.plan.chosen is not None
    assert f"hetero_stale would take {found.plan.chosen.step_s * 1e3:.1f} ms per update" in found.line
    assert "the next fit of this Trainer takes it" in found.line


@pytest.mark.parametrize("steps", [0, 23])
def test_few_steps_say_no_more_than_a_trial(steps: int) -> None:
    second = look()
    for step in range(steps):
        second.note(report(step, spells(step)))
    assert second.choose() is None


def test_a_report_counts_once_and_one_without_all_ranks_times_does_not() -> None:
    second = look()
    for _ in range(64):
        second.note(report(0, spells(0)))
        second.note(None)
    for step in range(1, 64):
        second.note(report(step, [0.0, *spells(step)[1:]]))
    assert second.choose() is None


def test_an_engine_that_refuses_the_module_is_not_taken() -> None:
    second = look({"stale": "no optimizer"})
    for step in range(64):
        second.note(report(step, spells(step)))
    assert second.choose() is None
