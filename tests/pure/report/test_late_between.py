"""Who takes long between two steps, e.g. for its loader: no other figure says it, and on a GPU nothing can."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.record.ledger import ledger_of
from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.figures import late_between
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.page.views import spent
from tests.pure.report.kit import events_of, run_with


def late(run: RecordedRun) -> tuple[int, float, float] | None:
    return late_between(run, ledger_of(run))


def test_slow_loading_is_named() -> None:
    """Rank 1 comes two seconds late, out of its loader, and rank 2 one; rank 0 waits in the exchange."""
    run = run_with([[(8, 1.0, 2.1), (8, 1.0, 0.1), (8, 1.0, 1.1)]] * 20)
    assert late(run) == (1, pytest.approx(2.0), pytest.approx(2.0))
    answer, _ = spent(RunFacts(run))
    assert answer.endswith("Between steps, e.g. for its loader, rank 1 takes 2.00 s (2.0 times the median).")


def test_between_steps_on_a_gpu_is_blamed_on_nobody() -> None:
    """The host of the fast rank waits for nothing that it sees: a second less work looks like a second more between."""
    begin, *told = events_of([[(8, 1.0, 0.0), (8, 2.0, 0.0)]] * 10)
    names = [replace(event, data={**event.data, "names": ["host cuda:0"]}) for event in (begin, told.pop(0))]
    assert late(run_of([*names, *told])) is None


def test_validation_in_an_epoch_does_not_count_as_between_steps() -> None:
    events = events_of([[(8, 1.0, 0.0), (8, 1.0, 0.0)]] * 20)
    pause = [replace(e, t_s=e.t_s + 50.0) if e.kind == "step" and e.step >= 10 and e.rank == 0 else e for e in events]
    assert late(run_of(pause)) is None


def test_a_little_and_one_rank_are_no_finding() -> None:
    assert late(run_with([[(8, 1.0, 0.14), (8, 1.0, 0.1)]] * 20)) is None
    assert late(run_with([[(8, 1.0, 0.0)]] * 20)) is None
