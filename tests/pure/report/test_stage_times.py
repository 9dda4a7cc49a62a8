"""One rank, one stage, or all: what is named, against matrices and runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.page.facts import RunFacts
from lightning_hetero.report.spent import StepStage, StepStages, outliers_of
from lightning_hetero.report.verdict import stage_answer, stage_names
from lightning_hetero.types import Event
from tests.pure.report.kit import RUNS, events_of, opened, pipeline_run, run_with

KINDS = ("work", "exchange", "waiting", "between")
NAMES = stage_names(RUNS["ddp"])


def times_with(rows: list[list[float]]) -> StepStages:
    """Rows of ranks, whose columns are `KINDS`."""
    columns = zip(*rows, strict=True)
    return StepStages(
        stages=tuple(
            StepStage(kind=kind, own=kind in ("work", "between"), seconds=tuple(column))
            for kind, column in zip(KINDS, columns, strict=True)
        ),
        steps=10,
    )


ABOUT = st.floats(0.98, 1.02)


@st.composite
def even(draw: st.DrawFn) -> list[list[float]]:
    """Ranks that take about as long as one another in each of the stages."""
    usual = [draw(st.floats(0.5, 1.0)) for _ in KINDS]
    return [[seconds * draw(ABOUT) for seconds in usual] for _ in range(draw(st.integers(2, 8)))]


@given(rows=even(), factor=st.floats(1.5, 20.0), data=st.data())
def test_a_rank_that_is_scaled_is_named_and_no_other(
    rows: list[list[float]], factor: float, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(rows) - 1))
    rows[rank] = [factor * seconds for seconds in rows[rank]]
    (found,) = outliers_of(times_with(rows))
    assert found.rank == rank and found.everything and found.ratio == pytest.approx(factor, rel=0.05)
    assert stage_answer(times_with(rows), NAMES).startswith(f"Rank {rank} is slow in everything (")


@given(rows=even(), factor=st.floats(0.01, 100.0), column=st.integers(0, len(KINDS) - 1))
def test_a_stage_that_is_scaled_names_no_rank(rows: list[list[float]], factor: float, column: int) -> None:
    for row in rows:
        row[column] *= factor
    assert outliers_of(times_with(rows)) == []
    answer = stage_answer(times_with(rows), NAMES)
    assert answer.startswith(("No rank stands out: ", "Nothing stands out: "))
    if factor > 50.0 and KINDS[column] != "work":
        assert NAMES[KINDS[column]] in answer


def test_the_rank_that_waits_is_not_slow_and_little_is_no_finding() -> None:
    waits = [[1.0, 0.1, 0.0, 0.1], [1.0, 0.1, 0.9, 0.1], [1.0, 0.1, 0.9, 0.1]]
    assert outliers_of(times_with(waits)) == []
    said = "No rank stands out: ranks spend 33 % of a step waiting, at different times."
    assert stage_answer(times_with(waits), NAMES) == said
    little = [[1.0, 0.1, 0.0, 0.001], [1.0, 0.1, 0.0, 0.01]]  # ten times as long, and no part of a step
    assert outliers_of(times_with(little)) == []
    assert stage_answer(times_with(little), NAMES).startswith("Nothing stands out: ") and NAMES["work"] == "own work"


SLOW = {
    "Rank 3 is slow in everything (2.0 times the median).": [[1.0, 0.1, 0.0, 1.0]] * 3 + [[2.0, 0.1, 0.0, 2.0]],
    "Rank 2 is slow between steps only (1.8 times the median).": [
        [1.0, 0.1, 0.0, 1.0], [1.0, 0.1, 0.0, 1.0], [1.0, 0.1, 0.0, 1.8], [1.0, 0.1, 0.0, 1.0]
    ],
    "No rank stands out: all ranks spend 45 % of a step in the exchange.": [[0.5, 0.45, 0.0, 0.05]] * 4,
    "Nothing stands out: ranks take about as long as one another, and own work is 90 % of a step.": [
        [0.9, 0.05, 0.0, 0.05]
    ] * 4,
}  # fmt: skip


@pytest.mark.parametrize("sentence", SLOW)
def test_the_sentences_on_the_page_of_the_docs(sentence: str) -> None:
    assert stage_answer(times_with(SLOW[sentence]), NAMES) == sentence
    page = (Path(__file__).parents[3] / "docs" / "reference" / "report.md").read_text()
    assert sentence.partition(", and ")[0] in page


def stage_times_of(run: RecordedRun) -> StepStages | None:
    return RunFacts(run).times


# ---- from runs ------------------------------------------------------------------------------------------------


def answer_of(run_name: str) -> str:
    run = RUNS[run_name]
    times = stage_times_of(run)
    assert times is not None
    return stage_answer(times, stage_names(run))


def seconds_of(times: StepStages | None) -> dict[str, tuple[float, ...]]:
    assert times is not None
    return {stage.kind: stage.seconds for stage in times.stages}


def test_slow_loading_is_no_exchange_and_is_told_from_slow_work() -> None:
    """Rank 1 comes a second late, out of its loader; rank 0 waits for it in the exchange, which takes 0.1 s."""
    steps = [[(8, 1.0, 1.1), (8, 1.0, 0.1)]] * 20
    found = stage_times_of(run_with(steps))
    assert found is not None
    assert seconds_of(found)["between"] == pytest.approx((0.0, 1.0))
    assert stage_answer(found, NAMES) == "Rank 1 is slow between steps only."
    assert seconds_of(found)["exchange"] == pytest.approx((0.1, 0.1))


def test_between_steps_on_a_gpu_is_blamed_on_nobody() -> None:
    """The host of the fast rank waits for nothing that it sees: a second less work looks like a second more between."""
    begin, *told = events_of([[(8, 1.0, 0.0), (8, 2.0, 0.0)]] * 10)
    names = [replace(event, data={**event.data, "names": ["host cuda:0"]}) for event in (begin, told.pop(0))]
    found = stage_times_of(run_of([*names, *told]))
    assert seconds_of(found) == {"work": (1.0, 2.0), "waiting": (1.0, 0.0)}


def test_validation_in_an_epoch_does_not_count_as_between_steps() -> None:
    events = events_of([[(8, 1.0, 0.0), (8, 1.0, 0.0)]] * 20)
    late = [replace(e, t_s=e.t_s + 50.0) if e.kind == "step" and e.step >= 10 else e for e in events]
    assert set(seconds_of(stage_times_of(run_of(late)))) == {"work"}


def test_a_federated_meeting_is_told_by_the_step_behind_it() -> None:
    """Two local steps and a meeting, in which rank 0 waits for rank 1's longer steps."""
    events = [opened(rank, 2, engine="federated") for rank in range(2)]
    for rank, (step_s, wait_s) in enumerate([(1.0, 2.2), (2.0, 0.2)]):
        now_s = 0.0
        for step in range(20):
            met_s = wait_s if step and step % 2 == 0 else 0.0
            now_s += met_s + step_s
            data = {"samples": 8, "compute_s": step_s, "wait_s": met_s}
            events.append(Event(kind="step", rank=rank, epoch=0, step=step, t_s=now_s, data=data))
    found = stage_times_of(run_of(events))
    # of the 18 last steps 9 follow a meeting
    assert seconds_of(found) == {
        "work": (1.0, 2.0), "exchange": pytest.approx((0.1, 0.1)), "waiting": pytest.approx((1.0, 0.0))
    }  # fmt: skip
    assert found is not None
    assert stage_answer(found, stage_names(run_of(events))) == "Rank 1 is slow in local steps (2.0 times the median)."


def test_stages_of_a_pipeline_are_compared_with_their_plan() -> None:
    """Rank 1 has twice the work by plan, so that is no finding; three times is one."""
    assert answer_of("pipeline") == "No rank stands out: ranks spend 75 % of a step in bubbles."
    run = pipeline_run((1.0, 0.5), [[(2, 4.0, 20.0), (0, 12.0, 12.0)]] * 5)
    found = stage_times_of(run)
    assert found is not None and found.stages[0].ratios == pytest.approx([1.0, 1.5])
    assert stage_answer(found, stage_names(run)).startswith("Rank 1 is slow in own work (1.5 times the median)")


def test_without_planned_times_stages_of_a_pipeline_do_not_compare() -> None:
    run = pipeline_run((1.0, 1.0), [[(2, 4.0, 4.0), (0, 6.0, 2.0)]] * 5)
    blind = replace(run, plan={**run.plan, "profile": None})
    found = stage_times_of(blind)
    assert found is not None and "do not compare" in stage_answer(found, stage_names(blind))
