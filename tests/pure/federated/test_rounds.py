"""A rank's way through the batches of an epoch: all ranks meet at the same ones, whoever rests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.federated.decide.rounds import (
    ClientRow,
    Course,
    RoundPlan,
    digest_of,
    disagreement,
    engine_metrics,
    of_all,
    spread,
    step_report,
)


def plan_of(*steps: int) -> RoundPlan:
    return RoundPlan(sizes=(4,) * len(steps), steps=steps, lr_factors=(1.0,) * len(steps))


def walk(courses: list[Course], plan: RoundPlan, chosen: frozenset[int]) -> tuple[list[list[int]], list[int]]:
    """Returns the batches each rank trains in, and those behind which all meet."""
    trained: list[list[int]] = [[] for _ in courses]
    meetings: list[int] = []
    for batch in range(courses[0].last + 1):
        ends = set()
        for rank, course in enumerate(courses):
            course.batch = batch
            if rank in chosen and course.trains(plan):
                trained[rank].append(batch)
            ends.add(course.ends_round(plan))
        assert len(ends) == 1, "some ranks meet and others do not"
        if ends.pop():
            meetings.append(batch)
            for course in courses:
                course.began = batch + 1
    return trained, meetings


def courses_of(batches: list[int], *, again: bool, accumulate: int = 1) -> list[Course]:
    return [Course(r, own, max(batches), again=again, accumulate=accumulate) for r, own in enumerate(batches)]


@given(
    batches=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    tau=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    again=st.booleans(),
    data=st.data(),
)
def test_all_ranks_meet_behind_the_same_slots_and_the_last(
    batches: list[int], tau: int, accumulate: int, again: bool, data: st.DataObject
) -> None:
    steps = data.draw(st.lists(st.integers(1, tau), min_size=len(batches), max_size=len(batches)))
    courses = courses_of(batches, again=again, accumulate=accumulate)
    trained, meetings = walk(courses, plan_of(*steps), frozenset(range(len(batches))))
    assert meetings[-1] == max(batches) - 1
    gaps = [b - a for a, b in zip([-1, *meetings], meetings, strict=False)]
    assert all(gap == accumulate * max(steps) for gap in gaps[:-1])
    for rank, slots in enumerate(trained):
        assert slots[0] == 0
        if again and steps[rank] == max(steps):
            assert slots == list(range(max(batches)))
        if not again:  # a step once begun is filled with a second pass
            assert len(slots) <= -(-batches[rank] // accumulate) * accumulate


def test_a_rank_whose_data_are_through_rests_or_begins_again() -> None:
    plan, all_of = plan_of(2, 2), frozenset({0, 1})
    rest, meetings = walk(courses_of([5, 2], again=False), plan, all_of)
    assert rest == [[0, 1, 2, 3, 4], [0, 1]] and meetings == [1, 3, 4]
    again, _ = walk(courses_of([5, 2], again=True), plan, all_of)
    assert again == [[0, 1, 2, 3, 4]] * 2


def test_lightning_counts_a_step_behind_each_window_and_the_last_batch() -> None:
    course, ends = Course(0, 5, 5, again=True, accumulate=2), []
    for course.batch in range(5):
        ends.append(course.ends_step)
    assert ends == [False, True, False, True, True]


def row(**given: float) -> ClientRow:
    return ClientRow(**{**dict.fromkeys(ClientRow._fields, 0.0), **given})


def test_ranks_at_other_places_or_with_other_parameters_are_told_apart() -> None:
    assert disagreement([row(), row()]) is None
    assert disagreement([row(states=1.0), row(states=2.0)]) is None  # of what may differ
    assert "not at the same (epoch, batch): {0: (0, 0), 1: (0, 4)}" in (disagreement([row(), row(batch=4.0)]) or "")
    assert "disagree" in (disagreement([row(), row(digest=digest_of("other"))]) or "")
    assert digest_of((4,), "a") != digest_of((4,), "b") and digest_of(plan_of(1)) == digest_of(plan_of(1))


def test_what_is_reported_is_the_mean_of_a_local_step() -> None:
    rows = [row(samples=40.0, steps=10.0, compute_s=2.0, made=10.0, wait_s=0.5, weight=30.0), row(weight=10.0)]
    report = step_report(rows, (4, 4), (0.25, 0.5))
    first, second = report.records
    assert (first.samples, first.compute_s, first.wait_s) == (4, pytest.approx(0.2), pytest.approx(0.05))
    assert (second.samples, second.compute_s) == (4, 0.0) and report.predicted_s == (0.25, 0.5)
    assert engine_metrics(3, rows, 2) == {
        "rounds": 3.0,
        "clients": 2.0,
        "local_steps/rank0": 10.0,
        "local_steps/rank1": 0.0,
        "weight/rank0": 0.75,
        "weight/rank1": 0.25,
    }


def test_a_rank_that_is_not_there_has_a_row_of_zeros_and_its_own_column() -> None:
    rows = [row(weight=10.0, batch=3.0, epoch=1.0), row(weight=30.0, batch=3.0, epoch=1.0)]
    everyone = of_all(rows, (0, 2), 4)
    assert [one.weight for one in everyone] == [10.0, 0.0, 30.0, 0.0] and {one.batch for one in everyone} == {3.0}
    metrics = engine_metrics(5, everyone, 2)
    assert metrics["clients"] == 2.0 and metrics["weight/rank1"] == 0.0 and metrics["weight/rank2"] == 0.75
    assert spread((7, 9), (0, 2), 4) == (7, 0, 9, 0)
    assert "{0: (1, 3), 2: (1, 4)}" in (disagreement([rows[0], rows[1]._replace(batch=4.0)], (0, 2)) or "")
