"""The schedule benchmark's arithmetic, on raw data made by hand, and its drawing of pipelines."""

from __future__ import annotations

import numpy as np

from benchmarks.planning.schedule import OURS, TEXTBOOK, figures, pipeline
from benchmarks.report import FIELDS


def test_figures_by_hand() -> None:
    raw = {
        f"link 0: {OURS}": [0.9, 1.01, 1.09],
        f"link 0.5: {OURS}": [0.9, 0.95, 1.11],
        f"link 0.5: {TEXTBOOK}": [1.2, 1.5, 1.3],
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
