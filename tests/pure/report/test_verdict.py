"""The sentences that a report opens with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.verdict import Verdict, as_fast, verdict_of
from tests.pure.report.kit import RUNS, opened, run_with


def judged(run: RecordedRun) -> Verdict:
    return RunFacts(run).verdict


def told(run: RecordedRun) -> str:
    return " ".join(judged(run).said)


def judged_as_if(run: RecordedRun, measured_s: float, engines: Mapping[str, float]) -> Verdict:
    """What is said of a run of hetero_balanced if a batch took so long, and others would take so long."""
    facts = RunFacts(replace(run, engine="balanced"))
    assert facts.alternatives is not None
    what = replace(facts.alternatives, measured_s=measured_s, engines={"balanced": measured_s, **engines})
    return verdict_of(facts.run, facts.ledger, facts.scores, what)


SLOW = run_with([[(15, 1.5, 1.55), (15, 3.0, 0.05)]] * 80)
EQUAL = run_with([[(8, 1.0, 0.01), (8, 1.0, 0.01)]] * 80)
TURNS = run_with([[(8, 1.0, 1.0), (8, 2.0, 0.0)], [(8, 2.0, 0.0), (8, 1.0, 1.0)]] * 40)


def test_a_slow_device_under_stock_ddp() -> None:
    found = judged(SLOW)
    assert found.headline.startswith("Devices waited 25 % of the time; hetero_") and found.level == "poor"
    assert "instead of 3.05 s: 1.4" in found.headline and found.headline.endswith("times as fast.")
    waited, next_step, others = found.said
    assert waited.startswith("Ranks waited for 120.0 of 488.0 device-seconds (25 %): rank 1 (host cpu:1) takes 2.00 ")
    assert next_step.startswith('Train with strategy="hetero_') and "nothing else in your code changes" in next_step
    assert "hetero_balanced would take about" in others and "hetero_stale would take about" in others


def test_an_engine_that_worked_says_so_first() -> None:
    found = judged_as_if(SLOW, 0.082, {"ddp": 0.2})
    assert found.headline == "hetero_balanced worked: 82.0 ms per batch, stock DDP about 200.0 ms: 2.4 times as fast."
    assert found.level == "good"


@pytest.mark.parametrize(
    ("run", "step_s", "why"),
    [
        (EQUAL, 0.1, "The devices are about equally fast"),
        (TURNS, 0.1, "No single rank is slow all the time"),
        (SLOW, 0.002, "Steps are too short: below about 3.0 ms"),
        (replace(SLOW, steps=SLOW.steps[:20]), 0.1, "There were only 20 steps"),
        (run_with([[(8, 1.0, 1.0), (8, 2.0, 0.8)]] * 80), 0.1, "of the time was spent in the exchange"),
    ],
)  # fmt: skip
def test_an_engine_that_gained_nothing_says_why(run: RecordedRun, step_s: float, why: str) -> None:
    found = judged_as_if(run, step_s, {"ddp": step_s})
    assert found.headline.startswith("hetero_balanced gained nothing: ") and why in found.headline
    slower = judged_as_if(run, step_s, {"ddp": step_s / 2})
    assert slower.headline.startswith("hetero_balanced made it slower: ") and slower.level == "poor"


def test_what_cannot_train_is_not_called_slower() -> None:
    found = judged_as_if(SLOW, 0.1, {"ddp": math.nan})
    assert found.headline == "hetero_balanced trains a model that stock DDP cannot hold: 100.0 ms per batch."
    assert "stock DDP cannot hold the model" in " ".join(found.said) and found.level == "good"


def test_equal_devices_need_nothing() -> None:
    found = judged(EQUAL)
    assert found.level == "good" and found.headline.startswith("Stay with stock DDP: ")
    assert "no rank waited long" in found.said[0] and found.said[1] == "Nothing to do about waiting."


def test_the_exchange_is_no_fault_of_a_rank() -> None:
    words = told(run_with([[(8, 1.0, 1.0), (8, 1.0, 1.0)]] * 20))
    assert "50 % of the time went into the exchange" in words and "accumulate_grad_batches" in words


def test_ranks_that_are_late_by_turns() -> None:
    assert "no single rank is to blame" in told(TURNS)


def test_waiting_while_a_run_begins_is_said() -> None:
    slow, even = [(8, 1.0, 9.0), (8, 10.0, 0.0)], [(8, 1.0, 0.1), (8, 1.1, 0.0)]
    assert "of the waiting was in the first 2 steps" in told(run_with([slow] * 2 + [even] * 18))


def test_more_work_is_told_from_a_slow_rank() -> None:
    assert "is not slow per item: it has more work" in told(run_with([[(8, 1.0, 1.0), (16, 2.0, 0.0)]] * 20))


def test_what_is_not_known_is_said_and_how_to_know_it() -> None:
    blind = judged(run_of([opened(0, 2), opened(1, 2)]))
    assert "not known: no rank's own work was measured" in blind.headline and "StragglerMonitor()" in blind.said[0]
    alone = judged(RUNS["files missing"])
    assert alone.headline == "How long ranks waited is not known: 1 of 2 ranks' files is missing."
    assert "copy rank1.jsonl into the same folder" in alone.said[0]
    assert judged(run_with([[(8, 1.0, 0.0)]] * 3)).headline == "There was one rank: it waits for nobody."


def test_speed_ups_in_words() -> None:
    assert [as_fast(r) for r in (2.44, 1.1, 0.8)] == ["2.4 times as fast", "1.10 times as fast", "1.25 times as long"]
