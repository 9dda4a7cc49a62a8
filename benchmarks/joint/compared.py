"""Part *compared*: scenarios, each with plans that stay, shares alone, the controller, and an oracle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.joint.plans import even_plans, lengths, mean_s, oracle_plans
from benchmarks.joint.scenarios import SAMPLES, SCENARIOS, Scenario, model_of
from lightning_hetero import LyapunovController
from lightning_hetero.pipeline.decide.plans import best_plan
from lightning_hetero.pipeline.decide.simulate.machine import Machine
from lightning_hetero.pipeline.decide.simulate.simulator import simulate

__all__ = ["NOTES", "figures", "measure", "table"]

BATCHES, SEEDS = 600, (1,)
CHAIN, EVEN, STATIC, HINDSIGHT, SHARES, OURS, ORACLE = (
    "even chain", "best of 1, 2, 4 even chains", "first plan", "best static plan in hindsight", "shares alone",
    "controller", "oracle",
)  # fmt: skip
NOTES = (
    f"Simulated, operation by operation, {BATCHES} batches, {len(SEEDS)} seeds; a decision is in force two"
    f" batches after"
    " the measurement it rests on. A base state of the cluster lasts 150 batches on average, a layer takes 0.1"
    " batches to"
    " move. *Hindsight*: the best of all plans that the oracle uses, over the whole trace. *Oracle*: sees a"
    " change as it"
    " happens, moves for nothing, takes the best of all plans found for any state; its search is not exact."
)


def measure(quick: bool) -> dict[str, dict[str, list[float]]]:
    """Returns mean batch times by scenario and contender, one per seed [s], and counts."""
    names = ("base", "capped") if quick else tuple(SCENARIOS)
    batches, seeds = (300, SEEDS[:1]) if quick else (BATCHES, SEEDS)
    return {name: _scenario(SCENARIOS[name], batches, seeds) for name in names}


def _scenario(case: Scenario, batches: int, seeds: tuple[int, ...]) -> dict[str, list[float]]:
    model, cluster = model_of(), case.cluster
    plan = best_plan(model, cluster, SAMPLES)
    first_s = Machine(model, cluster).batch(plan, case.trace(1, 0).phases[0]).seconds
    found: dict[str, list[float]] = {}
    for seed in seeds:
        machine = Machine(model, cluster, layer_s=case.move * plan.total_s)
        trace = case.trace(batches, seed)
        phases = lengths(trace, batches)
        even = {g: [mean_s(machine, p, phases) for p in even_plans(machine, g)] for g in (1, 2, 4)}
        best = oracle_plans(machine, phases)
        values = {
            CHAIN: min(even[1], default=float("nan")),
            EVEN: min([s for times in even.values() for s in times], default=float("nan")),
            STATIC: mean_s(machine, plan, phases),
            HINDSIGHT: min(mean_s(machine, p, phases) for p in [plan, *best]),
            ORACLE: sum(machine.batch(p, s).seconds * n for p, (s, n) in zip(best, phases, strict=True)) / batches,
        }  # fmt: skip
        for name, structure in ((SHARES, False), (OURS, True)):
            controller = LyapunovController(structure=structure).start(model, cluster, plan)
            rng = np.random.default_rng(seed)
            run = simulate(controller, machine, trace, plan, batches=batches, noise=case.noise, rng=rng)
            values[name] = run.mean_s
            if structure:
                values["moves"] = float(sum(d.kind == "plan" for d in run.decisions))
                values["rollbacks"] = float(sum(d.kind == "rollback" for d in run.decisions))
                values["paused"] = float(run.pause_s.sum() / (run.batch_s + run.pause_s).sum())
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    assert first_s > 0.0
    return found


def _less(values: Mapping[str, list[float]], other: str) -> float:
    return 100.0 * (1.0 - float(np.mean(values[OURS])) / float(np.mean(values[other])))


def figures(raw: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(name: str, value: float, unit: str, goal: str | None, holds: bool | None) -> None:
        found.append({"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds})

    for name, values in raw.items():
        title, goals = SCENARIOS[name].title, name == "base"
        less = _less(values, CHAIN)
        add(
            f"{title}: less time than the even chain",
            less,
            "%",
            "> 68.59" if goals else None,
            less > 68.59 if goals else None,
        )
        less = _less(values, HINDSIGHT)
        add(
            f"{title}: less time than the best static plan",
            less,
            "%",
            ">= 40" if goals else None,
            less >= 40.0 if goals else None,
        )
        less, wanted = _less(values, SHARES), 30.0 if name == "capped" else 0.0
        add(f"{title}: less time than shares alone", less, "%", f">= {wanted:g}", less >= wanted - 0.05)
        above = -_less(values, ORACLE)
        add(f"{title}: above the oracle", above, "%", "<= 10" if goals else None, above <= 10.0 if goals else None)
    return found


def table(raw: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Returns seconds per batch of all contenders."""
    columns = (CHAIN, EVEN, STATIC, HINDSIGHT, SHARES, OURS, ORACLE)
    lines = ["| seconds per batch | " + " | ".join(columns) + " | moves | rolled back | paused |"]
    lines.append("|---" * (len(columns) + 4) + "|")
    for name, values in raw.items():
        cells = [f"{np.mean(values[c]):.2f}" for c in columns]
        cells += [
            f"{np.mean(values['moves']):g}",
            f"{np.mean(values['rollbacks']):g}",
            f"{100 * np.mean(values['paused']):.1f} %",
        ]
        lines.append(f"| {SCENARIOS[name].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
