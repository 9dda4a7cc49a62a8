"""A rank at rest tells what it can do, and is woken when that has changed."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_hetero import LyapunovController, Scenario, ThrottleCallback
from tests.ranks.harness import run_ranks
from tests.ranks.kit import regression
from tests.ranks.pipeline.kit import Deep, fit, pipeline
from tests.ranks.pipeline.replan_kit import Scripted, group, heard, plan

REST, WORK = plan(group([1], [0, 6], 16)), plan(group([0], [0, 6], 8), group([1], [0, 6], 8))
SLOW, FAST, BATCHES = 6, 30, 60  # rank 1 is twenty times slower between these batches
EMULATED = Scenario(sample_s=2e-3).slow(1, 20.0, at_step=SLOW, steps=FAST - SLOW)


@heard(at_once=True)
def told(rank: int, world: int) -> list[list[dict[int, float]]]:
    found: list[list[dict[int, float]]] = []
    for scenario in (None, Scenario(sample_s=1e-4).slow(0, 4.0, at_step=3), Scenario().slow(0, 50.0, at_step=3)):
        scripted = Scripted({7: WORK})
        callbacks = [] if scenario is None else [ThrottleCallback(scenario)]
        strategy = pipeline(REST, controller=scripted)
        fit(rank, world, Deep(), strategy, data=regression(400), max_steps=12, callbacks=callbacks)
        found.append([dict(one.rest_s) for one in scripted.observed])
    return found


def test_a_rank_at_rest_tells_what_it_can_do() -> None:
    (real, emulated, stretched), nothing = run_ranks(2, told)
    assert nothing == [[], [], []], "rank 0 decides"
    for seen in (real, emulated, stretched):
        assert all(set(one) == {0} for one in seen[:8]) and all(one == {} for one in seen[9:])
    assert all(0.0 < one[0] < 1.0 for one in real[:8])
    assert [one[0] for one in emulated[:8]] == [1.0] * 3 + [4.0] * 5
    assert min(one[0] for one in stretched[3:8]) > 10 * min(one[0] for one in stretched[:3])


class InForce(Callback):
    """Notes who works in each batch."""

    def __init__(self) -> None:
        self.ranks: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.ranks.append(sorted(rank for group in trainer.strategy.plan.groups for rank in group.ranks))


def woken(rank: int, world: int) -> list[list[int]]:
    strategy, noted = pipeline(WORK, controller=LyapunovController()), InForce()
    callbacks = [ThrottleCallback(EMULATED), noted]
    fit(rank, world, Deep(), strategy, data=regression(16 * BATCHES), max_steps=BATCHES, callbacks=callbacks)
    return noted.ranks


@pytest.mark.timeout(120)
def test_a_rank_that_rests_because_it_is_slow_is_woken_when_it_is_fast_again() -> None:
    for ranks in run_ranks(2, woken):
        rests = ranks.index([0])
        assert SLOW < rests <= SLOW + 6, ranks
        wakes = ranks.index([0, 1], rests)
        assert FAST < wakes <= FAST + 8, ranks
