"""Where the time went, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_hetero.record.ledger import Spent, exchange_alone, idle_in, ledger_of, spent_together, waited_in
from lightning_hetero.types import Event, SpeedSample
from tests.pure.report.kit import run_with

STEPS = [[(8, 1.0, 1.5), (8, 2.0, 0.5)]] * 10


def test_the_last_ranks_wait_is_the_exchange_and_the_rest_is_idle() -> None:
    found = ledger_of(run_with(STEPS))
    assert found.ranks[0] == Spent(compute_s=10.0, exchange_s=5.0, idle_s=10.0)
    assert found.ranks[1] == Spent(compute_s=20.0, exchange_s=5.0, idle_s=0.0)
    assert found.total.total_s == 50.0  # ten steps of 2.5 s on two ranks
    assert (found.waited, found.exchange) == (pytest.approx(0.2), pytest.approx(0.2))
    assert found.caused_s == {0: 0.0, 1: 10.0} and found.caused == (1, 1.0)


def test_on_a_gpu_the_difference_in_work_is_the_waiting() -> None:
    run = replace(run_with([[(8, 1.0, 0.0), (8, 2.0, 0.0)]]), devices={0: "host cuda:0", 1: "host cuda:1"})
    assert ledger_of(run).total == Spent(compute_s=3.0, exchange_s=0.0, idle_s=1.0)


def test_who_is_late_by_turns_shares_the_blame() -> None:
    found = ledger_of(run_with([[(8, 1.0, 1.0), (8, 2.0, 0.0)], [(8, 4.0, 0.0), (8, 1.0, 3.0)]]))
    assert found.caused_s == {0: 3.0, 1: 1.0} and found.caused == (0, 0.75)


def test_in_a_pipeline_all_but_work_and_the_planned_synchronisation_is_idle() -> None:
    plan = {"plan": {"groups": [{"ranks": [0, 1], "cuts": [0, 1, 2]}], "sync_s": 0.25}}
    run = run_with(STEPS[:1], [Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=plan)], engine="pipeline")
    assert run.staged
    assert ledger_of(run).ranks == {
        0: Spent(compute_s=1.0, exchange_s=0.25, idle_s=1.25),
        1: Spent(compute_s=2.0, exchange_s=0.25, idle_s=0.25),
    }


def test_a_rank_at_rest_waits_for_nobody() -> None:
    """Rank 1 computes a dummy for half a second while rank 0 works for two."""
    run = run_with([[(16, 2.0, 0.5), (0, 0.5, 2.0)]], engine="balanced")
    assert ledger_of(run).ranks[1] == Spent(compute_s=0.5, exchange_s=0.5, rest_s=1.5)
    assert ledger_of(run).waited == 0.0 and ledger_of(run).total.total_s == 5.0


def test_waiting_in_the_first_tenth_of_the_steps() -> None:
    slow, even = [(8, 1.0, 9.0), (8, 10.0, 0.0)], [(8, 1.0, 1.0), (8, 2.0, 0.0)]
    assert ledger_of(run_with([slow, *[even] * 9])).early == pytest.approx(9.0 / 18.0)
    assert ledger_of(run_with([slow, *[even] * 8])).early == 0.0


def test_what_a_server_takes_at_least_is_no_waiting() -> None:
    """Of two ranks' waits the least quarter is the exchange alone, see `exchange_alone`: 0.1 s here."""
    waits = [0.1, 0.1, 0.5, 0.9]
    found = ledger_of(run_with([[(8, 1.0, w), (8, 1.0, 0.3)] for w in waits], engine="stale"))
    assert found.ranks[0].exchange_s == pytest.approx(0.4) and found.ranks[0].idle_s == pytest.approx(1.2)
    assert found.ranks[1].exchange_s == pytest.approx(0.4) and found.ranks[1].idle_s == pytest.approx(0.8)


def test_the_exchange_is_what_the_last_rank_sees_of_it() -> None:
    turns = [0.1, 0.7, 0.1, 0.9, 0.1, 0.8]  # last in every second step of two ranks
    assert exchange_alone(turns, ranks=2) == 0.1
    assert exchange_alone([0.3, 0.1, 0.2, 0.4], ranks=1) == 0.3  # always last: the median
    assert exchange_alone([0.3], ranks=8) == 0.3 and exchange_alone([], ranks=8) == 0.0


def test_of_one_step_waiting_and_what_is_no_work() -> None:
    """A step of 2.5 s on two ranks, of which the exchange is half a second: one waits for a second of five."""
    told = enumerate([(1.0, 1.5), (2.0, 0.5)])
    step = [SpeedSample(rank=r, step=0, samples=8, compute_s=c, wait_s=w) for r, (c, w) in told]
    assert waited_in([spent_together({one.rank: one for one in step})]) == pytest.approx(0.2)
    assert idle_in(step) == pytest.approx(0.4)
    assert math.isnan(waited_in([])) and math.isnan(idle_in([]))
