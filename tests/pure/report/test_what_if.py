"""Other engines on recorded times: against closed forms for ranks of constant speed."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.report.what_if import Recorded, recorded_of, what_if
from lightning_hetero.types import Event
from tests.pure.report.kit import run_with

# 15 samples each at 10 and 5 per second, and an exchange of 0.1 s.
STEPS = [[(15, 1.5, 1.6), (15, 3.0, 0.1)]] * 80


def test_two_ranks_of_constant_speed() -> None:
    found = what_if(run_with(STEPS))
    assert found is not None and (found.samples, found.steps, found.beside) == (30, 80, "balanced")
    assert found.measured_s == pytest.approx(3.1)
    assert found.engines["ddp"] == pytest.approx(3.1)
    assert found.engines["balanced"] == pytest.approx(2.1, rel=0.02)  # 20 and 10 samples
    # 15 samples per second together; the policy's rounds of whole chunks lose a little
    assert 2.0 <= found.engines["stale"] <= 2.4
    assert found.best[0] in ("balanced", "stale") and found.best[1] <= 2.15


def test_a_mended_rank_and_a_dropped_card() -> None:
    found = what_if(run_with(STEPS))
    assert found is not None
    assert [(one.rank, one.step_s) for one in found.mended] == [(0, pytest.approx(3.1)), (1, pytest.approx(1.6))]
    assert [one.ranks for one in found.dropped] == [(), (1,)]
    assert found.dropped[1].ddp_s == found.dropped[1].engine_s == pytest.approx(3.0)  # alone, without an exchange
    assert found.dropped[0].engine_s == pytest.approx(2.1, rel=0.02)


def test_a_slow_card_may_cost_more_than_it_brings_under_ddp() -> None:
    found = what_if(run_with([[(8, 1.0, 9.0), (8, 1.0, 9.0), (8, 10.0, 0.0)]] * 40))
    assert found is not None
    with_all, without = found.dropped[:2]
    assert with_all.ddp_s == pytest.approx(10.0) and without.ddp_s == pytest.approx(1.5) and without.ranks == (2,)


def test_a_spell_of_one_rank_stays_in_its_steps() -> None:
    """What balanced is asked about are the recorded steps, not means: in one slow step it pays as DDP does."""
    steps = [[(8, 1.0, 0.0), (8, 1.0, 0.0)] for _ in range(40)]
    steps[30] = [(8, 1.0, 4.0), (8, 5.0, 0.0)]
    known = recorded_of(run_with(steps))
    assert known is not None
    assert known.step_s("ddp") == pytest.approx((19 * 1.0 + 5.0) / 20)
    assert 1.0 < known.step_s("balanced") <= (19 * 1.0 + 5.0) / 20 * 1.1


def test_where_samples_differ_the_fixed_part_is_known() -> None:
    """0.2 s fixed and 0.1 s per sample: 16 samples take 1.8 s, not in proportion to 4 samples' 0.6 s."""
    told = [[(n, 0.2 + 0.1 * n, 0.0), (20 - n, 0.2 + 0.1 * (20 - n), 0.0)] for n in (4, 16, 10, 8, 12) * 12]
    known = recorded_of(run_with(told, engine="balanced"))
    assert known is not None
    assert known.seconds(0, 59, 16) == pytest.approx(1.8, rel=0.03)


def test_of_global_batches_only_the_full_ones_count() -> None:
    known = recorded_of(run_with([*STEPS[:10], [(3, 9.0, 0.0), (3, 9.0, 0.0)]]))
    assert known is not None and len(known.steps) == 10


def test_nothing_is_said_where_ranks_do_not_compare() -> None:
    assert what_if(run_with([[(8, 1.0, 0.0)]] * 9)) is None  # one rank
    plan = {"plan": {"groups": [{"ranks": [0, 1], "cuts": [0, 1, 2]}]}}
    event = Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=plan)
    assert what_if(run_with(STEPS, [event], engine="pipeline")) is None


def test_many_ranks_are_simulated_for_fewer_steps_and_too_many_not_at_all() -> None:
    assert not math.isnan(known_of(24, 6).step_s("stale"))
    assert math.isnan(known_of(82, 6).step_s("stale")) and math.isnan(known_of(2, 5).step_s("stale"))


def known_of(ranks: int, steps: int) -> Recorded:
    found = recorded_of(run_with([[(4, 1.0, 0.1)] * ranks] * steps))
    assert found is not None
    return found


def test_a_batch_smaller_than_the_ranks_has_no_stale_time() -> None:
    known = recorded_of(run_with([[(1, 1.0, 0.0), (0, 1.0, 0.0)]] * 8))
    assert known is not None and math.isnan(known.step_s("stale"))
