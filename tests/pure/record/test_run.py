"""From events to steps on one clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_hetero.record.run import run_of
from lightning_hetero.types import Event
from tests.pure.report.kit import decision, events_of, opened, run_with

STEPS = [[(8, 1.0, 1.5), (8, 2.0, 0.5)]] * 3


def test_a_step_knows_its_length_its_slowest_rank_and_its_samples() -> None:
    run = run_with(STEPS)
    assert (run.engine, run.ranks, run.meets, len(run.steps)) == ("ddp", 2, True, 3)
    assert [(s.step_s, s.slowest, s.samples) for s in run.steps] == [(2.5, 1, 16)] * 3
    assert run.devices == {0: "host cpu:0", 1: "host cpu:1"}


def test_clocks_are_set_by_the_ends_of_exchanges() -> None:
    run = run_of(events_of(STEPS, ahead_s=[100.0, 7.0]))
    assert [[t.end_s for t in step.turns.values()] for step in run.steps] == [[2.5] * 2, [5.0] * 2, [7.5] * 2]


def test_without_common_ends_the_hosts_clocks_are_believed() -> None:
    """Rank 1 has opened its trace two seconds later: at 3 s by its own clock rank 0's says 5."""
    events = [opened(0, 2, engine="stale", unix_s=100.0), opened(1, 2, engine="stale", unix_s=102.0)]
    data = {"samples": 4, "compute_s": 1.0, "wait_s": 0.0}
    events += [Event(kind="step", rank=r, epoch=0, step=0, t_s=3.0, data=data) for r in range(2)]
    run = run_of(events)
    assert not run.meets and [t.end_s for t in run.steps[0].turns.values()] == [1.0, 3.0]


def test_a_step_made_again_after_a_resume_counts_once_and_fill_ins_add_up() -> None:
    events = [*events_of([[(8, 1.0, 0.0)]]), *events_of([[(8, 3.0, 0.0)]])]
    assert [s.turns[0].compute_s for s in run_of(events).steps] == [3.0]
    first, second = events[1], replace(events[3], data={**events[3].data, "fill_in": True})
    (step,) = run_of([events[0], first, second]).steps
    assert (step.turns[0].samples, step.turns[0].compute_s) == (16, 4.0)


def test_the_clock_of_a_resumed_fit_goes_on() -> None:
    begin, *told = events_of([[(8, 1.0, 0.0)]] * 4)
    again = [replace(event, t_s=event.t_s - 2.0) for event in told[2:]]
    ends = [step.turns[0].end_s for step in run_of([begin, *told[:2], begin, *again]).steps]
    assert ends == sorted(ends) and ends[2] == pytest.approx(3.0)


def test_what_ranks_note_alike_is_taken_once_and_outcomes_find_their_decision() -> None:
    outcome = Event(
        kind="outcome", rank=0, epoch=0, step=2, t_s=0.0, data={"generation": 1, "realised_gain": 0.25}
    )
    decisions = [decision(1, (10, 6), rank=r, generation=1, predicted_gain=0.3, kind="shares") for r in range(2)]
    (change,) = run_with(STEPS, [*decisions, outcome]).changes
    assert (change.step, change.shares, change.predicted_gain, change.realised_gain) == (1, (10, 6), 0.3, 0.25)
    (unknown,) = run_with(STEPS, [decision(0, (10, 6), predicted_gain=None)]).changes
    assert math.isnan(unknown.predicted_gain) and math.isnan(unknown.realised_gain)


def test_queues_come_from_their_events_and_from_decisions() -> None:
    queue = Event(kind="queue", rank=0, epoch=0, step=2, t_s=0.0, data={"queues": {"money": 1.5}})
    run = run_with(STEPS, [decision(1, (10, 6), queues={"money": -0.5}), queue])
    assert run.queues == ((1, {"money": -0.5}), (2, {"money": 1.5}))


def test_a_trace_without_own_work_has_wall_times_only() -> None:
    events = [opened(0, 1), Event(kind="step", rank=0, epoch=0, step=0, t_s=1.0, data={"samples": 4, "step_s": 0.5})]
    run = run_of(events)
    assert run.steps == () and run.batches == 1


def test_events_without_a_first_line_are_refused() -> None:
    with pytest.raises(ValueError, match="no 'run' line"):
        run_of([])


# ---- what changes of shares promised and gave ----------------------------------------------------------------

SHORT = [(2, 0.1, 0.0), (1, 0.1, 0.0)]
BEFORE, AFTER = [(8, 1.0, 2.0), (8, 3.0, 0.0)], [(11, 2.0, 0.0), (5, 2.0, 0.0)]


def test_the_gain_is_of_the_first_batches_under_the_new_shares() -> None:
    """Decided in batch 4, in force from batch 6 on: 3 s before, 2 s after."""
    run = run_with([BEFORE] * 6 + [AFTER] * 5, [decision(4, (11, 5), predicted_gain=0.3)], engine="balanced")
    (change,) = run.outcomes()
    assert change.predicted_gain == 0.3 and change.realised_gain == pytest.approx(1.0 / 3.0)


def test_a_short_batch_says_nothing_of_a_change() -> None:
    steps = [BEFORE] * 6 + [AFTER, SHORT, SHORT, SHORT, AFTER, AFTER]
    (change,) = run_with(steps, [decision(4, (11, 5))], engine="balanced").outcomes()
    assert change.realised_gain == pytest.approx(1.0 / 3.0)


def test_a_change_that_never_came_into_force_gave_nothing() -> None:
    run = run_with([BEFORE] * 8, [decision(4, (11, 5), predicted_gain=0.3)], engine="balanced")
    (change,) = run.outcomes()
    assert math.isnan(change.realised_gain)


def test_of_two_changes_each_has_its_own_gain() -> None:
    worse = [(8, 1.0, 4.0), (8, 5.0, 0.0)]
    run = run_with(
        [BEFORE] * 4 + [AFTER] * 4 + [worse] * 4, [decision(2, (11, 5)), decision(7, (8, 8))], engine="balanced"
    )
    first, second = run.outcomes()
    assert first.realised_gain == pytest.approx(1.0 / 3.0) and second.realised_gain == pytest.approx(-1.5)
