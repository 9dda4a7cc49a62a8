"""The placement benchmark's arithmetic, on raw data made by hand, and its cases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.planning.cases import large_case, small_case
from benchmarks.planning.placement import LARGE, figures
from benchmarks.report import FIELDS


def test_figures_by_hand() -> None:
    raw = {
        "3 devices, sync light: gap": [0.0, 0.01, 0.002],
        "4 devices, sync heavy: gap": [0.0, 0.03],
        "64 x 1,000: time [s]": [2.5, 1.5],
        "64 x 1,000: above bound": [0.08],
        "16 x 100: time [s]": [0.5],
    }
    table = figures(raw)
    assert all(tuple(figure) == FIELDS for figure in table)
    assert {figure["name"]: (figure["value"], figure["holds"]) for figure in table} == {
        "3 devices, sync light, no gap": (1, None),
        "3 devices, sync light, mean gap": (0.4, True),
        "3 devices, sync light, largest gap": (1.0, None),
        "4 devices, sync heavy, no gap": (1, None),
        "4 devices, sync heavy, mean gap": (1.5, False),
        "4 devices, sync heavy, largest gap": (3.0, None),
        "64 x 1,000": (1.5, True),
        "64 x 1,000, above bound": (8.0, None),
        "16 x 100": (0.5, None),
    }
    assert LARGE["64 x 1,000"][-1] == 10.0


def test_small_cases_are_as_described() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        case = small_case(rng, 4, 6, sync=0.5, capped=True)
        assert len(case.cluster.devices) == 4 and len(case.model.layers) == 6 and 6 <= case.samples <= 12
        need = sum(c.state_bytes + 2 * c.activation_bytes for c in case.model.layers)
        assert all(0.3 * need <= d.mem_bytes <= 1.2 * need for d in case.cluster.devices)
    light, heavy = (small_case(np.random.default_rng(1), 3, 5, sync=sync) for sync in (0.1, 1.0))
    sizes = [sum(c.param_bytes for c in case.model.layers) for case in (light, heavy)]
    assert sizes[1] == pytest.approx(10.0 * sizes[0])


def test_large_cases_are_as_described() -> None:
    case = large_case(np.random.default_rng(0), 20, 30, fits=0.25)
    links = case.cluster.links
    assert links[0][7].bandwidth_bytes_per_s > 10.0 * links[0][8].bandwidth_bytes_per_s
    state = sum(c.state_bytes for c in case.model.layers)
    assert [d.mem_bytes for d in case.cluster.devices] == pytest.approx([1.25 * 0.25 * state] * 20)
    assert math.isinf(large_case(np.random.default_rng(0), 2, 3).cluster.devices[0].mem_bytes)
    assert case.samples == 320
