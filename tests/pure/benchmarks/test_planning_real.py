"""Predicted against measured steps: the arithmetic, by hand; the models; which cores there are."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks.planning_real.__main__ import CASES as NAMES
from benchmarks.planning_real.__main__ import cores_for
from benchmarks.planning_real.figures import WARM_UP, compared, figures, table
from benchmarks.planning_real.models import CASES, Case
from benchmarks.report import FIELDS


def run(*, predicted_s: list[float | None], compute_s: list[float], step_s: float, plan_s: float | None = None) -> Any:
    """A run whose first steps are of no use: ten times as slow, and predicted a hundred times as fast."""
    late = {"samples": [4, 4], "compute_s": compute_s, "predicted_s": predicted_s}
    early = {**late, "predicted_s": [None if s is None else s / 100 for s in predicted_s]}
    group = {"ranks": [1, 0], "cuts": [0, 2, 6], "micro_batches": [2, 2, 1]}
    return {
        "steps_s": [10 * step_s] * WARM_UP + [step_s] * 4,
        "used_s": [[9.0] * WARM_UP + [0.5] * 4] * 2,
        "reports": [{**(early if i < WARM_UP else late), "step": i} for i in range(WARM_UP + 4)],
        **({} if plan_s is None else {"plan": {"total_s": plan_s, "groups": [group]}}),
    }


def test_predictions_one_step_ahead_are_of_the_slowest_ranks_work() -> None:
    one = compared("balanced", run(predicted_s=[0.3, 0.4], compute_s=[0.5, 0.1], step_s=0.8))
    assert one is not None
    assert one.used == pytest.approx(0.7)
    assert (one.predicted_s, one.measured_s, one.step, one.work) == pytest.approx((0.4, 0.8, 0.5, 0.8))


def test_of_the_server_only_the_time_of_a_batch_is_compared() -> None:
    one = compared("stale", run(predicted_s=[0.3, 0.4], compute_s=[0.5, 0.1], step_s=0.8))
    assert one is not None and (one.step, one.work, one.used) == (0.5, None, None)


def test_a_plan_promises_the_step_and_the_work_of_every_rank() -> None:
    one = compared("pipeline", run(predicted_s=[0.3, 0.4], compute_s=[0.5, 0.1], step_s=0.8, plan_s=0.6))
    assert one is not None
    assert (one.predicted_s, one.step, one.work, one.used) == pytest.approx((0.6, 0.75, 0.8, 0.7))


@pytest.mark.parametrize("engine", ["ddp", "balanced"])
def test_who_predicts_nothing_is_left_out(engine: str) -> None:
    predicted = [0.3, 0.4] if engine == "ddp" else [0.3, None]
    assert compared(engine, run(predicted_s=predicted, compute_s=[1.0, 1.0], step_s=1.0)) is None


def repeats() -> dict[str, list[dict[str, dict[str, Any]]]]:
    """The same by both clocks, but for the predictions of own work, twice as high by the processor's."""

    def one(times: float, work_s: float) -> dict[str, Any]:
        return {
            "ddp": run(predicted_s=[], compute_s=[], step_s=1.0),
            "balanced": run(predicted_s=[work_s] * 2, compute_s=[0.5, 0.5], step_s=times),
            "pipeline": run(predicted_s=[work_s] * 2, compute_s=[0.5, 0.5], step_s=times, plan_s=0.5),
        }

    return {
        clock: [{"mlp": one(times, work_s), "gpt": one(2 * times, work_s)} for times in (0.5, 1.0, 4.0)]
        for clock, work_s in (("wall", 0.4), ("processor", 0.8))
    }


def test_figures_are_medians_over_repeats_and_ranges_over_models() -> None:
    found = {figure["name"]: figure["value"] for figure in figures(repeats())}
    assert all(set(figure) == set(FIELDS) for figure in figures(repeats()))
    assert found["mlp, balanced: step, predicted / measured"] == pytest.approx(0.4)
    assert found["gpt, balanced: step, predicted / measured"] == pytest.approx(0.2)
    assert found["mlp, pipeline: step, predicted / measured"] == pytest.approx(0.5)
    assert found["mlp, pipeline: own work, predicted / measured"] == pytest.approx(0.8)
    assert found["mlp, pipeline: own work, processor time, predicted / measured"] == pytest.approx(1.6)
    whole = "own work to all processor time of a step, predicted / measured"
    assert found[f"mlp, pipeline: {whole}"] == pytest.approx(1.6)
    ends = [found[f"all models, balanced: step, predicted / measured, {e}"] for e in ("least", "median", "greatest")]
    assert ends == pytest.approx([0.2, 0.3, 0.4])
    assert not any("ddp" in name for name in found)


def test_the_table_shows_median_least_and_greatest() -> None:
    _, _, first, second, *others = table(repeats()).splitlines()
    assert first == "| mlp | balanced | 400.0 (400.0 to 400.0) | 1000.0 (500.0 to 4000.0) | 0.40 (0.10 to 0.80) |" \
        " 0.80 (0.80 to 0.80) | 1.60 (1.60 to 1.60) | 1.60 (1.60 to 1.60) | – |"  # fmt: skip
    assert second.startswith("| mlp | pipeline | 500.0 (") and second.endswith(" | 1:2 0:4 (2+2+1) |")
    assert len(others) == 2


def test_every_rank_needs_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1, 2})
    assert cores_for(2) == [1, 2]
    for ranks in (1, 4):
        with pytest.raises(SystemExit, match=rf"--ranks {ranks} must be 2 to 3, the cores there are"):
            cores_for(ranks)
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(SystemExit, match="run it on Linux"):
        cores_for(2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_model_takes_a_step_on_its_data(case: Case) -> None:
    net, data = case.make(), case.dataset(2)
    net.training_step(data[:], 0).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
    assert len(net.layers) >= 4


def test_the_command_names_the_cases_that_there_are() -> None:
    assert tuple(case.name for case in CASES) == NAMES
