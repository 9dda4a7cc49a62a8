"""The same quantity has the same value wherever it is shown, or it has another name."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.cli.report import comparison_table, rank_table
from lightning_hetero.cluster.engine_times import would_take_s
from lightning_hetero.cluster.score import last_lines
from lightning_hetero.plan.planner import plan
from lightning_hetero.plan.setup import setup_from_run
from lightning_hetero.record.costs import costs_of
from lightning_hetero.record.ledger import Tally, ledger_of, samples_in, spent_together, waited_in
from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.figures import alternatives_of
from lightning_hetero.report.page.build import page_of
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.verdict import milliseconds, percent
from lightning_hetero.types import Event
from tests.pure.report.kit import Told, decision, events_of, opened, pipeline_run, run_with, stale_run

work, wait = st.floats(0.01, 2.0), st.floats(0.0, 1.0)


@st.composite
def runs(draw: st.DrawFn) -> RecordedRun:
    """Ranks whose work grows with samples, with noise; shares change once, and the last batch is short."""
    ranks, steps = draw(st.integers(2, 4)), draw(st.integers(12, 24))
    per_sample_s = [draw(st.floats(0.01, 0.1)) for _ in range(ranks)]
    shares = [[draw(st.integers(1, 16)) for _ in range(ranks)]]
    shares.append(draw(st.permutations(shares[0])))
    engine, at = draw(st.sampled_from(["ddp", "balanced"])), draw(st.integers(0, steps))
    if engine == "ddp":
        shares = [[8] * ranks] * 2
    told: list[list[Told]] = []
    for step in range(steps):
        samples = [1] * ranks if step == steps - 1 else shares[step >= at]
        compute_s = [n * s * draw(st.floats(0.9, 1.5)) for n, s in zip(samples, per_sample_s, strict=True)]
        end_s = max(compute_s) + draw(st.floats(0.0, 0.05))
        told.append([(n, s, end_s - s) for n, s in zip(samples, compute_s, strict=True)])
    more = [decision(at, shares[1])] if engine == "balanced" and at < steps else []
    return run_with(told, more, engine=engine)


@settings(max_examples=12)
@given(run=runs())
def test_one_value_of_each_quantity(run: RecordedRun) -> None:
    ledger = ledger_of(run)
    words = unescape(re.sub(r"<[^>]+>", " ", page_of(RunFacts(run))))

    # waiting: the sums by hand, the report in each place, the tables, and the monitor, which adds up step by step
    total_s = sum(turn.compute_s + turn.wait_s for step in run.steps for turn in step.turns.values())
    waited_s = sum(t.wait_s - min(u.wait_s for u in s.turns.values()) for s in run.steps for t in s.turns.values())
    assert ledger.waited == pytest.approx(waited_s / total_s)
    assert f"{percent(ledger.waited)} of all ranks' time is waiting" in words
    told = re.findall(r"([\d.]+) of ([\d.]+) device-seconds \(([\d.]+ %)\)", words)
    assert told in ([], [(f"{waited_s:.1f}", f"{total_s:.1f}", percent(ledger.waited))])
    result = {"waiting": ledger.waited, "ranks": [asdict(rank) for rank in ledger.figures]}
    assert comparison_table([result]).splitlines()[-1].split()[-1] == f"{100 * ledger.waited:.1f}"
    tally = Tally(run.ranks)
    spent = [spent_together(step.turns) for step in run.steps]
    for step, own in zip(run.steps, spent, strict=True):
        tally.add(step, own)
    of_monitor = tally.ledger()
    assert replace(ledger, early=0.0, note="") == of_monitor and waited_in(spent) == pytest.approx(ledger.waited)

    # a step, and where a rank's time of it went; batch, shares and speeds
    assert all(f.compute_s + f.exchange_s + f.wait_s == pytest.approx(ledger.step_s) for f in ledger.figures)
    assert sum(f.share for f in ledger.figures) == pytest.approx(1.0)
    assert sum(f.samples_per_step for f in ledger.figures) == pytest.approx(ledger.batch) == sum(ledger.shares)
    table = [line.split() for line in rank_table(result["ranks"]).splitlines()[2:]]
    assert [float(row[2]) for row in table] == pytest.approx([f.samples_per_step for f in ledger.figures], abs=0.06)
    if found := re.search(r"last full batch was shared ([\d/]+)", words):
        assert found[1] == "/".join(map(str, ledger.shares))

    # what others would take: the planner, the report, the monitor
    by_plan = {one.engine: one.step_s for one in plan(setup_from_run(run), ("ddp", "balanced", "stale")).estimates}
    alternatives = alternatives_of(run, ledger)
    assert alternatives is not None and alternatives.measured_s == ledger.step_s
    assert would_take_s(costs_of(of_monitor), ledger.batch) == pytest.approx(by_plan)
    assert alternatives.engines == pytest.approx({**by_plan, run.engine: ledger.step_s})
    assert milliseconds(ledger.step_s) in words
    if run.engine == "ddp":
        assert by_plan["ddp"] == pytest.approx(ledger.step_s)
        lines = last_lines(of_monitor)
        assert f"{100 * ledger.waited:.0f} % of your" in lines and f"A step took {1e3 * ledger.step_s:.1f} ms" in lines
        for engine in ("balanced", "stale"):
            assert f"{1e3 * alternatives.engines[engine]:.1f} ms" in lines


def test_missing_files_are_a_state_and_no_zero() -> None:
    """Each node has written its own rank's file: the ordinary case of several nodes."""
    events = [e for e in events_of([[(8, 1.0, 1.0), (8, 2.0, 0.0)] * 2] * 20) if e.rank == 0]
    run = run_of(events)
    ledger = ledger_of(run)
    assert run.missing == (1, 2, 3) and ledger.problem == "not known: 3 of 4 ranks' files are missing"
    figures = (ledger.waited, ledger.exchange, ledger.step_s, ledger.samples_per_s, ledger.total.total_s)
    assert all(map(math.isnan, figures)) and ledger.figures == [] and ledger.shares == () and ledger.batch == 0
    assert alternatives_of(run, ledger) is None and samples_in(run, 20) == (0, 0)
    with pytest.raises(ValueError, match="3 of 4 ranks' files are missing"):
        setup_from_run(run)
    assert ledger_of(run_of([opened(0, 2), opened(1, 2)])).problem == "not known: no rank's own work was measured"


def test_windows_that_differ_are_a_state() -> None:
    events = events_of([[(8, 1.0, 1.0), (8, 2.0, 0.0)]] * 20)
    cut = run_of([e for e in events if not (e.kind == "step" and e.rank == 1 and e.step >= 12)])
    assert ledger_of(cut).note == "12 of 20 steps were recorded by all ranks; the others are left out"
    assert ledger_of(cut).steps == 12 and ledger_of(run_of(events)).note == ""
    stale = [replace(e, data={**e.data, "engine": "stale"}) if e.kind == "run" else e for e in events]
    left = run_of([e for e in stale if not (e.kind == "step" and e.rank == 1 and e.step >= 12)])
    assert ledger_of(left).note == "not all ranks' records are of the whole run of 20 steps: rank 1's end at step 12"


def test_too_few_steps_are_too_few() -> None:
    few = ledger_of(run_with([[(8, 1.0, 1.0), (8, 2.0, 0.0)]] * 6))
    assert few.too_few == "6 steps: too few to compare, at least 10 are needed"
    assert ledger_of(run_with([[(8, 1.0, 1.0), (8, 2.0, 0.0)]] * 10)).too_few == ""


def test_all_stages_of_a_group_work_on_its_samples() -> None:
    """Only a group's first stage is told its samples."""
    run = pipeline_run((1.0, 0.5), [[(2, 4.0, 20.0), (0, 8.0, 16.0)]] * 5)
    ledger = ledger_of(run)
    assert ledger.shares == run.steps[0].samples_of(2) == (2, 2) and ledger.batch == 2
    first, second = ledger.figures
    assert (first.share, second.share) == (1.0, 1.0) and first.samples_per_step == second.samples_per_step == 2.0
    assert (first.samples_per_s, second.samples_per_s) == (0.5, 0.25)
    plan = {"plan": {"groups": [{"ranks": [1, 0], "cuts": [0, 1, 2]}]}}  # another one, decided in step 2
    changed = Event(kind="decision", rank=0, epoch=0, step=2, t_s=0.0, data={**plan, "kind": "plan", "reason": "r"})
    begun = Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=run.plan)
    told = events_of([[(2, 4.0, 20.0), (3, 8.0, 16.0)]] * 5, engine="pipeline")
    assert [step.samples_of(2) for step in run_of([*told, begun, changed]).steps] == [(2, 2)] * 3 + [(3, 3)] * 2


def test_what_the_stale_engine_wasted_is_counted_apart() -> None:
    assert samples_in(stale_run(), 40) == (8 * 40 - 8, 8)


def test_of_steady_times_the_end_is_told_and_a_slow_start_is_no_cost() -> None:
    """The first steps took ten times as long; balanced shares are known to cost in proportion."""
    slow, fast = [(8, 10.0, 20.0), (8, 30.0, 0.0)], [(12, 1.2, 0.0), (4, 1.2, 0.0)]
    run = run_with([slow] * 2 + [fast] * 38, engine="balanced")
    found = alternatives_of(run, ledger_of(run))
    assert found is not None and found.measured_s == pytest.approx(1.2)
    assert found.engines["ddp"] == pytest.approx(2.4)
