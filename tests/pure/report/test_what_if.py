"""Other engines on recorded times: against closed forms for ranks of constant speed."""

from __future__ import annotations

import pytest

from lightning_hetero.record.ledger import ledger_of
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.report.figures import Alternatives, alternatives_of, pipeline_of
from lightning_hetero.types import Event
from tests.pure.report.kit import run_with

# 15 samples each at 10 and 5 per second, and an exchange of 0.1 s.
STEPS = [[(15, 1.5, 1.6), (15, 3.0, 0.1)]] * 80


def asked(run: RecordedRun) -> Alternatives:
    ledger = ledger_of(run)
    found = alternatives_of(run, ledger, pipeline_of(run, ledger))
    assert found is not None
    return found


def test_two_ranks_of_constant_speed() -> None:
    found = asked(run_with(STEPS))
    assert found.samples == 30
    assert found.measured_s == pytest.approx(3.1) and found.engines["ddp"] == pytest.approx(3.1)
    assert found.engines["balanced"] == pytest.approx(2.1, rel=0.02)  # 20 and 10 samples
    # 15 samples per second together, where each rank's exchange is not hidden: 1.9 s of 2 in each
    assert 2.0 <= found.engines["stale"] <= 2.4
    assert found.best[0] in ("balanced", "stale") and found.best[1] <= 2.15


def test_a_spell_of_one_rank_stays_in_its_steps() -> None:
    """What balanced is asked about are the recorded steps, not means: in one slow step it pays as DDP does."""
    steps = [[(8, 1.0, 0.0), (8, 1.0, 0.0)] for _ in range(40)]
    steps[30] = [(8, 1.0, 4.0), (8, 5.0, 0.0)]
    found = asked(run_with(steps)).engines
    assert found["ddp"] == pytest.approx((19 * 1.0 + 5.0) / 20)  # of the last half
    assert 1.0 < found["balanced"] <= (19 * 1.0 + 5.0) / 20 * 1.1


def test_of_global_batches_only_the_full_ones_count() -> None:
    found = asked(run_with([*STEPS[:10], [(3, 9.0, 0.0), (3, 9.0, 0.0)]]))
    assert found.samples == 30 and found.measured_s == pytest.approx(3.1)


def nothing(run: RecordedRun) -> bool:
    return alternatives_of(run, ledger_of(run)) is None


def test_nothing_is_said_where_ranks_do_not_compare() -> None:
    assert nothing(run_with([[(8, 1.0, 0.0)]] * 9))  # one rank
    plan = {"plan": {"groups": [{"ranks": [0, 1], "cuts": [0, 1, 2]}]}}
    event = Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=plan)
    assert nothing(run_with(STEPS, [event], engine="pipeline"))
    assert nothing(run_with([[(8, 1.0, 0.0), (8, 0.0, 1.0)]] * 9))  # a rank never worked
