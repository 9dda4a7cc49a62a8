"""A rank's way through the batches of an epoch: all ranks meet at the same ones, whoever rests."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.federated.decide.rounds import (
    ClientRow,
    Course,
    RoundPlan,
    cut_stream,
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
            if rank in chosen and course.trains(plan, rank):
                trained[rank].append(batch)
            ends.add(course.ends_round(plan))
        assert len(ends) == 1, "some ranks meet and others do not"
        if ends.pop():
            meetings.append(batch)
            for course in courses:
                course.began = batch + 1
    return trained, meetings


def courses_of(batches: list[int], *, again: bool, accumulate: int = 1) -> list[Course]:
    ends = [math.inf if again else -(-own // accumulate) * accumulate for own in batches]
    return [Course(rank, ends, max(batches), accumulate=accumulate) for rank in range(len(batches))]


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
    whole = accumulate * max(steps)
    assert all(gap == whole or (gap < whole and not again and min(steps) < max(steps)) for gap in gaps[:-1])
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
    course, ends = Course(0, [math.inf], 5, accumulate=2), []
    for course.batch in range(5):
        ends.append(course.ends_step)
    assert ends == [False, True, False, True, True]


# ---- finite streams ----------------------------------------------------------------------------------------


@given(samples=st.integers(0, 40), size=st.integers(1, 9), least=st.integers(1, 2), drop_last=st.booleans())
def test_a_stream_is_cut_into_the_batches_that_were_told(
    samples: int, size: int, least: int, drop_last: bool
) -> None:
    left, sizes, least = samples, list[int](), min(least, size)
    told, _ = cut_stream(samples, size, least=least, drop_last=drop_last)
    while (found := cut_stream(left, size, least=least, drop_last=drop_last))[0]:
        assert found[0] == told - len(sizes)
        sizes.append(found[1])
        left -= found[1]
    assert left == (samples % size if drop_last else 0) and len(sizes) == told
    assert all(n >= least for n in sizes) or sizes == [samples]
    assert all(n == size for n in sizes[:-2]) and max(sizes, default=0) < size + least
    assert least > 1 or all(n == size for n in sizes[:-1])


@given(
    left=st.lists(st.integers(0, 14), min_size=1, max_size=4).filter(any),
    tau=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    limit=st.integers(1, 40),
    data=st.data(),
)
def test_all_streams_end_at_one_batch_which_was_known_before_its_round(
    left: list[int], tau: int, accumulate: int, limit: int, data: st.DataObject
) -> None:
    """Each round has other steps; nobody tells of more than one batch behind the round."""
    ranks, course, trained = range(len(left)), Course(0, [math.inf] * len(left), limit, accumulate=accumulate), 0
    rest = list(left)
    while course.batch <= course.last:
        plan = plan_of(*(data.draw(st.integers(1, tau)) for _ in ranks))
        course.hear(plan, course.batch, [min(n, accumulate * s + 1) for n, s in zip(rest, plan.steps, strict=True)])
        known = course.last
        while True:
            mine = [course.trains(plan, rank) for rank in ranks]
            rest = [n - now for n, now in zip(rest, mine, strict=True)]
            trained += sum(mine)
            assert min(rest) >= 0 and course.last == known
            for course.rank in ranks:
                cut = not rest[course.rank] and mine[course.rank] and not course.ends_step
                assert course.cuts_step == cut
            over = course.ends_round(plan)
            course.batch += 1
            if over:
                break
        course.began = course.batch
        assert any(mine) or (accumulate > 1 and course.batch <= course.last)  # a window that was cut short
    assert trained == sum(left) - sum(rest) and (not any(rest) or course.batch == limit)


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
