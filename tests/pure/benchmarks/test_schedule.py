"""The schedule benchmark's arithmetic, on raw data made by hand, and its drawing of pipelines."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planning.schedule import OURS, TEXTBOOK, blocking_model_s, disturbed, figures, pipeline
from benchmarks.report import FIELDS
from lightning_hetero.pipeline.decide.schedule import PipelineTimes, generate, replay


def test_figures_by_hand() -> None:
    raw = {
        f"link 0: {OURS}": [0.9, 1.01, 1.09],
        f"link 0.5: {OURS}": [0.9, 0.95, 1.11],
        f"link 0.5: {TEXTBOOK}": [1.2, 1.5, 1.3],
        "link 0.5: off by 20 %, fixed order / new order": [1.0] * 9 + [1.2],
        "link 0.5: schedules refused": [0.0, 1.0, 0.0],
        "8 stages x 64 micro-batches, makespan only [ms]": [10.0, 60.0, 11.0],
    }
    table = figures(raw)
    assert all(tuple(figure) == FIELDS for figure in table)
    found = {figure["name"]: (figure["value"], figure["holds"]) for figure in table}
    assert found == {
        f"link 0: {OURS}, median": (1.01, False),
        f"link 0: {OURS}, max": (1.09, True),
        f"link 0.5: {OURS}, median": (0.95, True),
        f"link 0.5: {OURS}, max": (1.11, False),
        f"link 0.5: {TEXTBOOK}, median": (1.3, None),
        f"link 0.5: {TEXTBOOK}, max": (1.5, None),
        "link 0.5: off by 20 %, fixed order / new order, 90 %": (pytest.approx(1.02), True),
        "link 0.5: off by 20 %, fixed order / new order, max": (1.2, None),
        "link 0.5: schedules refused": (1.0, False),
        "8 stages x 64 micro-batches, makespan only": (11.0, True),
    }


def test_drawn_pipelines_are_as_described() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        times = pipeline(rng, 0.5)
        stage_s = [f[0] + b[0] for f, b in zip(times.forward_s, times.backward_s, strict=True)]
        links = [row[0] for row in (*times.link_forward_s, times.loop_forward_s)]
        assert 0.5 <= min(stage_s) <= max(stage_s) <= 1.0
        assert 2.0 * max(links) <= 0.5 * max(stage_s)
        assert 2 * times.stages <= times.micro_batches <= 6 * times.stages


def test_disturbing_changes_computation_only_and_within_limits() -> None:
    rng = np.random.default_rng(1)
    times = pipeline(rng, 0.5)
    other = disturbed(rng, times, 0.2)
    ratios = {round(b / a, 9) for x, y in ((times.forward_s, other.forward_s), (times.backward_s, other.backward_s))
              for r, s in zip(x, y, strict=True) for a, b in zip(r, s, strict=True)}  # fmt: skip
    assert len(ratios) == times.stages
    assert min(ratios) >= 0.8 and max(ratios) <= 1.2
    assert other.link_forward_s == times.link_forward_s
    assert disturbed(rng, times, 0.0) == times


def test_the_blocking_model_counts_a_transfer_on_both_devices() -> None:
    times = PipelineTimes.proportional(
        [1.0] * 3, forward_s=[1.0, 2.0], backward_s=[1.0, 2.0], link_s=[0.5], loop_s=0.25
    )
    # fill 6 + 4 transfers; device 1: computes 4, transfers 2 * 0.5 + 2 * 0.25
    assert blocking_model_s(times) == 7.5 + 2 * 5.5
    assert replay(generate(times, overlap=False), times).makespan_s <= 1.1 * blocking_model_s(times)
