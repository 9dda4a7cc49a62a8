"""The federated benchmark: what its figures are made of, and that its clients follow the engine's own decisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks.federated import training
from benchmarks.federated.__main__ import figures_of
from benchmarks.federated.training import CLIENTS, SPEEDS, Course, scenario_of, train, weighted_mean
from lightning_hetero.federated.decide.policy import FedAvg, LbBsp


def course(*accuracy: float, round_s: float) -> Course:
    times = [round_s * (i + 1) for i in range(len(accuracy))]
    return Course(accuracy=list(accuracy), time_s=times, waiting=[0.5] * len(times), samples=[1] * len(times))


def test_the_time_to_a_target_is_that_of_the_smoothed_accuracy() -> None:
    run = course(0.2, 0.95, 0.5, 0.9, 0.94, 0.95, round_s=2.0)
    assert run.smooth()[3] == pytest.approx((0.95 + 0.5 + 0.9) / 3)
    assert run.time_to(0.9) == 12.0 and run.time_to(0.99) is None


def test_figures_compare_runs_of_one_seed_with_each_other() -> None:
    slow = [course(0.9, 0.9, round_s=10.0)] * 2
    fast = [course(0.5, 1.0, 1.0, round_s=2.0), course(0.9, 0.9, round_s=4.0)]
    by_policy = {"fedavg": slow, "lb-bsp": fast, "adaptive_steps": slow}
    figures = {figure["name"]: figure for figure in figures_of({"steady": by_policy}, 0.75)}
    ours = figures["steady: lb-bsp, time to target"]
    assert ours["value"] == pytest.approx((4.0 / 10.0 + 4.0 / 10.0) / 2) and ours["holds"] is True
    assert figures["steady: adaptive_steps, time to target"]["holds"] is None
    lost = figures["steady: lb-bsp, final accuracy lost to fedavg"]
    assert lost["value"] == pytest.approx(100 * (0.9 - (0.8333333 + 0.9) / 2), abs=1e-3) and lost["holds"] is False
    alike = figures["steady: lb-bsp, accuracy lost after as many rounds"]
    assert alike["value"] == pytest.approx(100 * (0.9 - (0.75 + 0.9) / 2), abs=1e-3)
    missed = figures_of({"steady": {**by_policy, "lb-bsp": [slow[0], course(0.1, 0.1, round_s=1.0)]}}, 0.75)
    told = {figure["name"]: figure for figure in missed}
    assert told["steady: lb-bsp, runs that reach the target"]["value"] == 1
    assert told["steady: lb-bsp, time to target"]["holds"] is False


def test_drifting_devices_walk_within_bounds_and_steady_ones_stay() -> None:
    steady, drifting = scenario_of("steady", 5, 1), scenario_of("drifting", 5, 1)
    assert [steady.speed(r, 300) for r in range(CLIENTS)] == list(SPEEDS)
    assert [drifting.speed(r, 0) for r in range(CLIENTS)] == list(SPEEDS)
    assert all(0.05 <= drifting.speed(r, 300) <= 2.0 for r in range(CLIENTS))
    assert [drifting.speed(r, 300) for r in range(CLIENTS)] != list(SPEEDS)


def test_clients_are_weighted_by_what_they_have_used_or_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[float]] = []

    def noted(copies: Any, weights: list[float]) -> Any:
        told.append(weights)
        return weighted_mean(copies, weights)

    monkeypatch.setattr(training, "weighted_mean", noted)
    for owned in (False, True):
        train(LbBsp(), scenario_of("steady", 1, 0), rounds=1, seed=0, owned=owned)
    assert told[0] == [160.0] * CLIENTS and sum(told[1]) == 1440.0 and len(set(told[1])) > 4


def test_a_short_course_is_the_same_again_and_lb_bsp_rounds_are_shorter() -> None:
    torch.set_num_threads(1)
    scenario = scenario_of("steady", 3, 0)
    first, again = (train(LbBsp(), scenario, rounds=3, seed=0) for _ in range(2))
    equal = train(FedAvg(again=True), scenario, rounds=3, seed=0)
    assert first.plain() == again.plain()
    short = train(LbBsp(), scenario, rounds=3, seed=0, most_s=first.time_s[0])
    assert short.accuracy == first.accuracy[:1]
    assert first.samples == equal.samples and first.accuracy[0] == equal.accuracy[0]
    assert first.time_s[0] == equal.time_s[0]
    assert first.time_s[2] - first.time_s[1] < 0.5 * (equal.time_s[2] - equal.time_s[1])
    assert math.isclose(equal.waiting[0], 1 - sum(1 / s for s in SPEEDS) / 8 * 0.125, abs_tol=0.05)
