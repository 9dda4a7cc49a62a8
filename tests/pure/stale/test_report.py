"""Reports of the stale engine, worked out by hand from the server's counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_hetero.stale.decide.report import Counts, Measures, Since, advice, engine_metrics, summary


def measured(**more: Any) -> Measures:
    """Ten updates: rank 0 gave 60 fresh samples, rank 1 30, of which 10 one and 5 three versions old."""
    counts = Counts()
    for _ in range(10):
        counts.applied(0.002)
    for queue in (1, 4, 2):
        counts.waiting(queue)
    counts.accepted(0, 60, 0, 0.6)
    for samples, age in ((15, 0), (10, 1), (5, 3)):
        counts.accepted(1, samples, age, 0.4)
    counts.held(0, 0.05)
    counts.held(1, 0.2)
    counts.discarded["stale"] += 7
    counts.discarded["gone"] += 1
    counts.reissued["stalled"] += 9
    return Measures(
        counts=replace(counts, **more), epoch=1, global_step=3, version_gap=2, shares=(6, 3),
        predicted_s=(0.06, 0.05),
    )  # fmt: skip


def test_measures_and_counts_survive_the_way_to_a_worker() -> None:
    again = Measures.of(json.loads(json.dumps(measured().as_dict())))
    assert again == measured()
    assert again.counts.staleness[9] == 0  # still a counter
    assert again.counts.as_dict()["samples"] == {"0": 60, "1": 30}


def test_engine_metrics() -> None:
    assert engine_metrics(measured(), 3) == pytest.approx(
        {
            "staleness_mean": 25 / 90,
            "staleness_max": 3,
            "stale_fraction": 15 / 90,
            "version_gap": 2,
            "discarded_samples": 8,
            "reissued_samples": 9,
            "hold_s": 0.025,
            "apply_s": 0.002,
            "queue": 4,
            "contribution/rank0": 60 / 90,
            "contribution/rank1": 30 / 90,
            "contribution/rank2": 0.0,
        }
    )


def test_reports_are_means_per_update_since_the_last() -> None:
    since, first = Since(), measured()
    report = since.report(first, 2)
    assert report is not None and (report.epoch, report.step) == (1, 3)
    assert [(r.rank, r.samples) for r in report.records] == [(0, 6), (1, 3)]
    assert [r.compute_s for r in report.records] == pytest.approx([0.06, 0.12])
    assert [r.wait_s for r in report.records] == pytest.approx([0.005, 0.02])
    assert report.predicted_s == (0.06, 0.05)
    assert since.report(first, 2) is None  # no update since
    samples, compute_s = Counter({0: 60, 1: 50}), {0: 0.6, 1: 1.6}
    later = since.report(measured(updates=12, samples=samples, compute_s=compute_s), 2)
    assert later is not None
    assert [r.samples for r in later.records] == [0, 10]
    assert [r.compute_s for r in later.records] == pytest.approx([0.0, 0.2])
    assert [r.wait_s for r in later.records] == [0.0, 0.0]


def test_summary() -> None:
    line = summary(measured(), 2)
    assert line is not None
    for part in ("10 updates", "67/33 %", "16.7 % were stale", "at most 3 versions", "8 samples were wasted"):
        assert part in line
    assert summary(measured(updates=0), 2) is None


@pytest.mark.parametrize(("fraction", "updates", "told"), [(0.25, 100, False), (0.3, 100, True), (0.3, 7, False)])
def test_advice_comes_above_a_quarter_and_not_at_once(fraction: float, updates: int, told: bool) -> None:
    stale = round(100 * fraction)
    said = advice(Counts(updates=updates, staleness=Counter({0: 100 - stale, 2: stale})))
    assert (said is not None) == told
    if said is not None:
        assert said.startswith("30 % of the samples") and "policy='flexible'" in said
    assert advice(Counts()) is None
