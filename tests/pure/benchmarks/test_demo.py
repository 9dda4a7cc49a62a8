"""`benchmarks.demo`: accuracies are paired by seed."""

from __future__ import annotations

import pytest

from benchmarks.demo.__main__ import figures_of


def test_an_engine_is_held_against_ddp_of_the_same_seed() -> None:
    def runs(*accuracies: float, fit_s: float) -> dict[int, dict[str, float]]:
        return {seed: {"accuracy": a, "fit_s": fit_s} for seed, a in enumerate(accuracies)}

    found = figures_of({
        "ddp": runs(95.0, 96.0, 94.0, fit_s=20.0),
        "hetero_balanced": runs(95.0, 96.0, 94.0, fit_s=10.0),
        "hetero_stale": runs(94.0, 96.0, 93.2, fit_s=8.0),
    })  # fmt: skip
    by_name = {figure["name"]: figure for figure in found}
    assert by_name["hetero_balanced: accuracy to DDP's, mean"]["value"] == pytest.approx(0.0)
    assert by_name["hetero_balanced: speed-up over DDP"]["value"] == pytest.approx(2.0)
    mean = by_name["hetero_stale: accuracy to DDP's, mean"]
    assert mean["value"] == pytest.approx(-0.6) and (mean["goal"], mean["holds"]) == (">= -0.5", False)
    assert by_name["hetero_stale: accuracy to DDP's, worst seed"]["value"] == pytest.approx(-1.0)
    # differences -1, 0, -0.8: variance 0.28
    error = by_name["hetero_stale: accuracy to DDP's, standard error"]["value"]
    assert error == pytest.approx((0.28 / 3) ** 0.5)
