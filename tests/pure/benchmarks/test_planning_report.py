"""The planning benchmark's report, on raw data made by hand."""

from __future__ import annotations

import numpy as np

from benchmarks.planning import partition, planned, schedule
from benchmarks.planning.__main__ import report
from benchmarks.planning.cases import small_case
from benchmarks.report import FIELDS


def test_parts_are_named_and_their_values_rounded() -> None:
    raw = {"partition": {"small: gap": [0.01, 0.0]}, "planned": {"small": [0.9, 1.0, 1.1234567]}}
    figures, rounded, notes = report(raw)
    assert all(tuple(figure) == FIELDS for figure in figures)
    assert [(f["name"], f["value"], f["holds"]) for f in figures] == [
        ("partition: small: gap, mean of 2", 0.5, True),
        ("partition: small: gap, largest", 1.0, None),
        ("planned: small, median of 3", 1.0, True),
        ("planned: small, max of 3", 1.1235, False),
    ]
    assert rounded == {"partition: small: gap": [0.01, 0.0], "planned: small": [0.9, 1.0, 1.1235]}
    assert notes == f"**partition.** {partition.NOTES}\n\n**planned.** {planned.NOTES}"


def test_the_table_of_depths_and_orders() -> None:
    raw: dict[str, list[float]] = {}
    for link in schedule.LINKS:
        for i, name in enumerate(schedule.POLICIES):
            raw[f"link {link:g}: {name}"] = [1.0 + i / 10] * 10 + [2.0 + link]
        raw[f"link {link:g}: activations held, per-link / S-i"] = [1.0, 2.5, 3.0]
    intro, _, head, _, first, *_, last = schedule.table(raw).splitlines()
    assert intro.startswith("Makespan / model")
    assert head.split(" | ")[1:4] == list(schedule.POLICIES)[:3]
    assert first.startswith("| 0 | 1.00 / 1.00 / 2.00 | 1.10 / 1.10 / 2.00 |")
    assert last.endswith("| 1.40 / 1.40 / 3.00 | x2.50 |") and last.startswith("| 1 |")


def test_plans_promise_what_their_schedules_take() -> None:
    found: list[float] = []
    for seed in range(6):
        case = small_case(np.random.default_rng(seed), 3, 8, sync=0.0, samples=16, capped=seed % 2 == 1)
        found += planned.ratios(case)
    assert len(found) >= 4
    assert min(found) > 0.8 and max(found) <= 1.1


def test_partition_figures_by_hand() -> None:
    table = partition.figures({"small, caps: gap": [0.0, 0.02], "64 x 1000 [ms]": [40.0, 60.0, 70.0]})
    assert all(set(figure) == set(FIELDS) for figure in table)
    assert [(f["name"], f["value"], f["goal"], f["holds"]) for f in table] == [
        ("small, caps: gap, mean of 2", 1.0, "<= 0.5", False),
        ("small, caps: gap, largest", 2.0, None, None),
        ("64 x 1000", 60.0, None, None),
    ]
