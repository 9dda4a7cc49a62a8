"""The simulated benchmark of the controller: baselines are no worse than they can be, figures say what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.joint import budget, compared
from benchmarks.joint.plans import blended_plans, fastest, mean_s
from benchmarks.joint.scenarios import SAMPLES, SCENARIOS, cluster_of, model_of
from benchmarks.joint.simulated.machine import Machine
from benchmarks.joint.simulated.traces import Phase
from benchmarks.joint.waves import waves_s
from lightning_hetero.solvers.placement import evaluate_plan
from lightning_hetero.solvers.plans import replicas

MODEL = model_of(6)
WORK_S = sum(layer.forward.per_sample_s + layer.backward.per_sample_s for layer in MODEL.layers)
CALM, SLOW = Phase(start=0, slowness=(1.0, 1.0)), Phase(start=3, slowness=(4.0, 1.0))


def test_the_fastest_plan_is_found_as_if_all_were_simulated() -> None:
    machine = Machine(MODEL, cluster_of((1.0, 0.5)))
    shares = [(n, SAMPLES - n) for n in range(8, SAMPLES, 12)]
    plans = [evaluate_plan(MODEL, machine.cluster, replicas(6, pair).groups) for pair in shares]
    for phases in ([(CALM, 3), (SLOW, 7)], [(CALM, 9), (SLOW, 1)], [(SLOW, 1)]):
        best, best_s = fastest(machine, plans, phases)
        times = [mean_s(machine, plan, phases) for plan in plans]
        assert best == plans[times.index(min(times))] and best_s == pytest.approx(min(times))
    assert fastest(machine, [], [(CALM, 1)])[0] is None


def test_plans_for_the_mean_and_for_the_worst_are_among_the_static_ones() -> None:
    """Of two devices one is slow half of the time: none of the two states' own plans is the best that stays."""
    machine = Machine(MODEL, cluster_of((1.0, 1.0)))
    phases = [(CALM, 5), (SLOW, 5)]
    shares = [tuple(g.samples for g in plan.groups) for plan in blended_plans(machine, phases)]
    mean, geometric, worst = (pair[0] / SAMPLES for pair in shares)
    assert (mean, geometric, worst) == pytest.approx((1 / 3.5, 1 / 3, 1 / 5), abs=0.02)


def test_waves_wait_for_nobody() -> None:
    """Two workers of one device each: the slow one slows itself only."""
    machine = Machine(MODEL, cluster_of((1.0, 1.0)))
    fixed_s = 6 * 2e-4 / 16  # per sample, in micro-batches of 16
    each_s = WORK_S + fixed_s
    assert waves_s(machine, [(CALM, 1)]) == pytest.approx(SAMPLES * each_s / 2)
    assert waves_s(machine, [(CALM, 3), (SLOW, 1)]) == pytest.approx(SAMPLES * each_s * (0.75 / 2 + 0.25 / 1.25))


def values(**times: list[float]) -> dict[str, dict[str, list[float]]]:
    columns = {name: times.get(name.split()[0], [10.0] * 2) for name in (
        compared.CHAIN, compared.EVEN, compared.WAVES, compared.STATIC, compared.HINDSIGHT, compared.SHARES,
        compared.OURS, compared.ORACLE,
    )}  # fmt: skip
    return {"base": columns | {key: [0.0] * 2 for key in ("moves", "rollbacks", "paused")}}


def by_name(figures: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in figures}


def test_means_over_seeds_are_held_against_goals_and_the_worst_seed_is_told() -> None:
    found = by_name(compared.figures(values(controller=[5.0, 6.0], oracle=[4.0, 4.0])))
    mean, worst = (found[f"base: less time than the best static plan{more}"] for more in ("", ", worst seed"))
    assert (mean["value"], mean["holds"]) == (pytest.approx(45.0), True)
    assert (worst["value"], worst["goal"]) == (pytest.approx(40.0), None)
    above, worst = (found[f"base: above the oracle{more}"] for more in ("", ", worst seed"))
    assert (above["value"], above["holds"], worst["value"]) == (pytest.approx(37.5), False, pytest.approx(50.0))
    assert found["base: less time of the oracle than the best static plan"]["value"] == pytest.approx(60.0)
    assert found["base: less time than the even chain"]["holds"] is False
    assert "| base | 10.00 |" in compared.table(values())


def test_scenarios_that_differ_in_moving_and_noise_share_what_neither_concerns() -> None:
    keys = {name: (case.speeds, case.fitting, case.traced) for name, case in SCENARIOS.items()}
    assert len({keys[name] for name in ("capped", "heavy", "heavier", "noisy", "noisier")}) == 1
    assert len(set(keys.values())) == len(keys) - 4


@pytest.mark.parametrize(("spent", "holds"), [(0.94, False), (0.96, True), (1.019, True), (1.03, False)])
def test_the_default_keeps_the_budget_and_uses_it(spent: float, holds: bool) -> None:
    n = len(budget.VS)
    rows = {"v": list(budget.VS), "time_s": [1.0] * n, "spent": [1.0] * n, "last_queue": [1.0] * n}
    default = {"v": [40.0], "time_s": [1.1], "spent": [spent], "last_queue": [3.0]}
    raw = {"limits": {"best_s": [1.0], "batches": [100.0]}, **dict.fromkeys(budget.BANKS, rows), "default": default}
    assert by_name(budget.figures(raw))["default, V = 40: cost / budget"]["holds"] is holds
