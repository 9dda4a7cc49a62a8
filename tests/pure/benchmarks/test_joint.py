"""The scenarios of the joint benchmark's real half, and its arithmetic on raw data made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.joint.courses import CHAIN, EVEN, ORACLE, OURS, SHARES, STATIC, TICK_S, Course, courses, played, read
from benchmarks.joint.figures import answers, course_figures, steps_of
from benchmarks.joint.plans import prepared
from benchmarks.report import FIELDS
from lightning_hetero.pipeline.decide.plans import check_plan
from lightning_hetero.solvers.plans import plan_from_plain

EVERY = courses()
PLAIN: dict[str, Any] = {
    "name": "two", "models": ["mlp"], "global_batch": 8, "sample_s": 0.01, "fixed_s": 0.0,
    "cluster": {"devices": [{"count": 2}]}, "batches": 10,
    "changes": [{"at": 4, "until": 8, "rank": 1, "factor": 4}], "contenders": [CHAIN, SHARES, OURS, ORACLE],
    "less_than": {CHAIN: 50, SHARES: 0},
}  # fmt: skip


# ---- scenarios -------------------------------------------------------------------------------------------------


def test_changes_make_phases_and_states() -> None:
    course = read(PLAIN)
    assert course.phases == [(0, (1.0, 1.0)), (4, (1.0, 0.25)), (8, (1.0, 1.0))]
    assert course.states == [(1.0, 1.0), (1.0, 0.25)] and course.numbered == [(0, 0), (4, 1), (8, 0)]
    assert [course.scenario.speed(1, step) for step in (3, 4, 7, 8)] == [1.0, 0.25, 0.25, 1.0]
    assert [d.speed for d in course.case_in((1.0, 0.25)).cluster.devices] == [1.0, 0.25]
    late = read({**PLAIN, "changes": [{"at": 4, "rank": 1, "factor": 4, "until": 12}]})
    assert [start for start, _ in late.phases] == [0, 4]
    steady = course.steady([(1.0, 1.0), (1.0, 1.0), (1.0, 0.25)], 5)
    assert [steady.speed(1, step) for step in (0, 9, 10, 14)] == [1.0, 1.0, 0.25, 0.25]


def test_changes_at_times_are_steps_of_a_tick() -> None:
    course = read({**PLAIN, "unit": "second"})
    assert [start for start, _ in course.phases] == [0, 4, 8]
    assert [course.scenario.speed(1, int(s / TICK_S)) for s in (3.9, 4.0, 7.9, 8.0)] == [1.0, 0.25, 0.25, 1.0]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"speeds": []}, r"unknown keys \['speeds'\]"),
        ({"contenders": [OURS, ORACLE, "mine"]}, r"\['mine'\] must be some of"),
        ({"contenders": [OURS, ORACLE]}, r"must have \['even chain', 'static plan \+ shares'\]"),
        ({"unit": "hour"}, "batch or second"),
        ({"changes": [{"at": 4, "until": 4, "rank": 1, "factor": 4}]}, "end after it"),
        ({"changes": [{"at": 0.5, "rank": 1, "factor": 4}]}, "whole number"),
        ({"changes": [{"at": 4, "rank": 2, "factor": 4}]}, "2 ranks"),
        ({"changes": [{"at": 4, "rank": 1, "factor": 0.5}]}, "factor must be >= 1"),
    ],
)
def test_mistakes_are_named(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read({**PLAIN, **more})


def test_who_does_not_answer_is_as_slow_as_the_state() -> None:
    assert played([(0, 0), (2, 1), (4, 0)], "batch", 5, [[1.0, 2.0], [9.0]]) == [1.0, 2.0, 9.0, 9.0, 1.0]
    assert played([(0, 0), (2, 1), (6, 0)], "second", 6, [[1.5], [3.0]]) == [1.5, 1.5, 3.0, 1.5, 1.5, 1.5]


# ---- plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["base", "memory_capped"])
def test_plans_fit_and_none_is_better_than_the_oracle(stem: str) -> None:
    course = EVERY[stem]
    found = prepared(course)
    layers = 16
    for plain in (*found["plans"].values(), *found["oracle"]):
        check_plan(plan_from_plain(plain), layers=layers, ranks=4, global_batch=course.case.global_batch)
    modelled = found["modelled_s"]
    assert len(found["oracle"]) == len(course.states) and set(found["plans"]) == {CHAIN, EVEN, STATIC} & set(
        course.contenders
    )
    assert modelled[ORACLE] < modelled[STATIC] < modelled[CHAIN]
    assert [len(g["ranks"]) for g in found["plans"][CHAIN]["groups"]] == [4]


# ---- figures ---------------------------------------------------------------------------------------------------

OURS_S = [1.0] * 4 + [5.0, 2.4, 2.5, 2.0] + [1.0, 1.0]


def raw(ours_s: list[float] = OURS_S) -> dict[str, Any]:
    def replan(kind: str, pause_s: float, sent: int, cancelled: str = "") -> dict[str, Any]:
        return {"kind": kind, "pause_s": pause_s, "bytes": sent, "cancelled": cancelled}

    replans = [replan("plan", 0.4, 3_000_000), replan("shares", 9.0, 0), replan("plan", 9.0, 9, "no room")]
    return {
        "batches": 10,
        "unit": "batch",
        "states": [[1.0, 1.0], [1.0, 0.25]],
        "phases": [[0, 0], [4, 1], [8, 0]],
        "modelled_s": {CHAIN: 3.3, ORACLE: 1.3},
        "measured": {
            CHAIN: {"by_state_s": [[3.0], [4.0, 6.0]], "taken": 1.0},
            SHARES: {"steps_s": [1.0] * 4 + [4.0] * 4 + [1.0] * 2, "taken": 1.0, "replans": [], "moved": [],
                     "plans": [[0, "a"]]},
            OURS: {"steps_s": ours_s, "taken": 1.01, "replans": replans, "moved": [3, 2],
                   "plans": [[0, "a"], [5, "b"]]},
            ORACLE: {"by_state_s": [[1.0, 0.9, 1.1], [2.0]], "taken": 1.0},
        },
    }  # fmt: skip


def by_name(course: Course, found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    figures = course_figures(course, found)
    assert all(set(figure) == set(FIELDS) for figure in figures)
    return {figure["name"].removeprefix("two: "): figure for figure in figures}


def test_figures_by_hand() -> None:
    course = read({**PLAIN, "above_oracle": 10})
    found = raw()
    assert steps_of(found, CHAIN) == [3.0] * 4 + [4.0, 6.0, 4.0, 6.0] + [3.0] * 2
    assert steps_of(found, ORACLE) == [1.0, 0.9, 1.1, 1.0, 2.0, 2.0, 2.0, 2.0, 0.9, 1.1]
    figures = by_name(course, found)
    values = {name: figure["value"] for name, figure in figures.items()}
    assert values == pytest.approx(
        {
            "controller, all batches": 17.9,
            f"less time than {CHAIN}": 100 * (1 - 17.9 / 38.0),
            f"less time than {SHARES}": 100 * (1 - 17.9 / 22.0),
            "above the oracle": 100 * (17.9 / 14.0 - 1),
            "batches until within 1.25 of the best, longest after a change": 1,
            "migrations": 1,
            "moving a layer": 0.4 / 5,
            "emulated work, taken / asked, greatest of all": 1.01,
        }
    )
    assert [figures[name]["holds"] for name in values] == [None, True, True, False, None, None, True, True]
    assert figures[f"less time than {CHAIN}"]["goal"] == ">= 50"


def test_a_change_is_answered_when_three_batches_in_a_row_are_good() -> None:
    assert answers(raw(), OURS_S) == [(1, True), (0, True)]
    assert answers(raw(), [1.0] * 4 + [2.0, 2.0, 3.0, 2.0, 1.3, 1.0]) == [(3, True), (1, True)]
    assert answers(raw(), [1.0] * 4 + [4.0] * 4 + [1.0] * 2) == [(4, False), (0, True)]
    by_clock = {**raw(), "unit": "second", "phases": [[0, 0], [4, 1], [14, 0]]}
    assert answers(by_clock, OURS_S) == [(1, True), (0, True)]  # batch 4 begins at 4 s, batch 7 at 13.9 s
