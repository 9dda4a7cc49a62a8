"""The sentences that a report opens with."""

from __future__ import annotations

from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.verdict import Verdict, verdict_of
from tests.pure.report.kit import opened, run_with


def judged(run: RecordedRun) -> Verdict:
    facts = RunFacts(run, None, ({}, {}))
    return verdict_of(run, facts.waiting, facts.scores, facts.alternatives)


def test_a_slow_device_under_stock_ddp() -> None:
    found = judged(run_with([[(15, 1.5, 1.55), (15, 3.0, 0.05)]] * 80))
    assert found.waited == "You waited 120.0 of 488.0 device-seconds (25 %)."
    assert found.cause.startswith("Rank 1 (host cpu:1) takes 2.00 times as long per item of work")
    assert found.next_step.startswith('Train with strategy="hetero_') and found.level == "poor"
    assert "instead of 3.05 s: 1.4" in found.gain and "times as fast" in found.gain


def test_equal_devices_need_nothing() -> None:
    found = judged(run_with([[(8, 1.0, 0.01), (8, 1.0, 0.01)]] * 20))
    assert found.level == "good" and found.cause.startswith("Nobody waits for long")
    assert found.next_step == "Nothing to do about waiting." and "no other engine would take 2 % less" in found.gain


def test_the_exchange_is_no_fault_of_a_rank() -> None:
    found = judged(run_with([[(8, 1.0, 1.0), (8, 1.0, 1.0)]] * 20))
    assert found.cause.startswith("50 % of the time went into the exchange")
    assert "accumulate_grad_batches" in found.next_step


def test_ranks_that_are_late_by_turns() -> None:
    turns = [[(8, 1.0, 1.0), (8, 2.0, 0.0)], [(8, 2.0, 0.0), (8, 1.0, 1.0)]]
    found = judged(run_with(turns * 20))
    assert found.cause.startswith("No single rank")


def test_waiting_while_a_run_begins_is_said() -> None:
    slow, even = [(8, 1.0, 9.0), (8, 10.0, 0.0)], [(8, 1.0, 0.1), (8, 1.1, 0.0)]
    found = judged(run_with([slow] * 2 + [even] * 18))
    assert "of the waiting was in the first 2 steps" in found.cause


def test_more_work_is_told_from_a_slow_rank() -> None:
    found = judged(run_with([[(8, 1.0, 1.0), (16, 2.0, 0.0)]] * 20))
    assert "is not slow per item: it has more work" in found.cause


def test_what_was_not_measured_is_said_and_how_to_measure_it() -> None:
    found = judged(run_of([opened(0, 2), opened(1, 2)]))
    assert "not measured" in found.waited and "StragglerMonitor()" in found.next_step
    assert judged(run_with([[(8, 1.0, 0.0)]] * 3)).waited == "One device waits for nobody."
