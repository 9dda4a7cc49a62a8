"""Part *compared*: scenarios, each with plans that stay, shares alone, the controller, and an oracle."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from benchmarks.joint.plans import blended_plans, even_plans, fastest, lengths, mean_s, oracle_plans
from benchmarks.joint.scenarios import SAMPLES, SCENARIOS, Scenario, Traced, cluster_of, model_of
from benchmarks.joint.simulated.machine import Machine
from benchmarks.joint.simulated.simulator import simulate
from benchmarks.joint.waves import waves_s
from lightning_hetero import LyapunovController
from lightning_hetero.pipeline.decide.plans import best_plan

BATCHES, SEEDS = 2400, (1, 2, 3)
CHAIN, EVEN, WAVES, STATIC, HINDSIGHT, SHARES, OURS, ORACLE = (
    "even chain", "best of 1, 2, 4 even chains", "waves", "first plan", "best static plan in hindsight",
    "shares alone", "controller", "oracle",
)  # fmt: skip
NOTES = (
    f"Simulated, operation by operation, {BATCHES} batches, {len(SEEDS)} seeds; a decision is in force two batches"
    " after the measurement it rests on. A base state of the cluster lasts 150 batches on average, a layer takes 0.1"
    " batches to move. *Hindsight*: the best over the whole trace of all plans that the oracle uses, and of those for"
    " the cluster at its mean and at its worst. *Oracle*: sees a change as it happens, moves for nothing, takes the"
    " best of all plans found for any state; its search is not exact. *Waves*, after HetPipe: virtual workers of equal"
    " composition that never wait for one another, by the formula, weights sent for nothing: stale updates, so not the"
    " same mathematics, and no less time than this. All but the goals' worst seeds are means over seeds."
)


def measure(quick: bool) -> dict[str, dict[str, list[float]]]:
    """Returns mean batch times by scenario and contender, one per seed [s], and counts."""
    names = ("base", "capped") if quick else tuple(SCENARIOS)
    batches, seeds = (300, SEEDS[:1]) if quick else (BATCHES, SEEDS)
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        case, columns = SCENARIOS[name], found.setdefault(name, {})
        for seed in seeds if case.traced.drawn else seeds[:1]:
            for column, value in _contenders(case, batches, seed).items():
                columns.setdefault(column, []).append(value)
    return found


def _contenders(case: Scenario, batches: int, seed: int) -> dict[str, float]:
    model, cluster = model_of(), case.cluster
    plan, trace = best_plan(model, cluster, SAMPLES), case.traced.trace(batches, seed)
    values = dict(_fixed(case.speeds, cluster.devices[0].mem_bytes, case.traced, batches, seed))
    for name, structure in ((SHARES, False), (OURS, True)):
        machine = Machine(model, cluster, layer_s=case.move * plan.total_s)
        controller = LyapunovController(structure=structure).start(model, cluster, plan)
        rng = np.random.default_rng(seed)
        run = simulate(controller, machine, trace, plan, batches=batches, noise=case.noise, rng=rng)
        values[name] = run.mean_s
        if structure:
            values["moves"] = float(sum(d.kind == "plan" for d in run.decisions))
            values["rollbacks"] = float(sum(d.kind == "rollback" for d in run.decisions))
            values["paused"] = float(run.pause_s.sum() / (run.batch_s + run.pause_s).sum())
    return values


@cache
def _fixed(
    speeds: tuple[float, ...], mem_bytes: float, traced: Traced, batches: int, seed: int
) -> Mapping[str, float]:
    """Returns the times of those that neither measure nor move: scenarios that differ in these only share them."""
    model, cluster = model_of(), cluster_of(speeds, mem_bytes)
    machine, plan = Machine(model, cluster), best_plan(model, cluster, SAMPLES)
    phases = lengths(traced.trace(batches, seed), batches)
    even = {groups: even_plans(machine, groups) for groups in (1, 2, 4)}
    best = oracle_plans(machine, phases)
    candidates = list(dict.fromkeys([plan, *blended_plans(machine, phases), *best]))
    return {
        CHAIN: fastest(machine, even[1], phases)[1],
        EVEN: fastest(machine, [plan for plans in even.values() for plan in plans], phases)[1],
        WAVES: waves_s(machine, phases),
        STATIC: mean_s(machine, plan, phases),
        HINDSIGHT: fastest(machine, candidates, phases)[1],
        ORACLE: sum(machine.batch(p, s).seconds * n for p, (s, n) in zip(best, phases, strict=True)) / batches,
    }  # fmt: skip


def _less(values: Mapping[str, list[float]], one: str, other: str) -> tuple[float, float]:
    """Returns by how much less time one contender takes than another: of the means over seeds, and least [%]."""
    a, b = np.array(values[one]), np.array(values[other])
    return 100.0 * (1.0 - float(a.mean() / b.mean())), 100.0 * (1.0 - float((a / b).max()))


def figures(raw: Mapping[str, Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, values in raw.items():
        base, title = name == "base", SCENARIOS[name].title
        wanted = 30.0 if name == "capped" else 0.0
        rows = (
            ("less time than the even chain", *_less(values, OURS, CHAIN), "> 68.59" if base else None, 68.59),
            ("less time than the best static plan", *_less(values, OURS, HINDSIGHT), ">= 40" if base else None, 40.0),
            ("less time than shares alone", *_less(values, OURS, SHARES), f">= {wanted:g}", wanted - 0.05),
        )
        for what, mean, worst, goal, least in rows:
            found.append(_figure(f"{title}: {what}", mean, goal, mean >= least))
            if goal is not None:
                found.append(_figure(f"{title}: {what}, worst seed", worst, None, False))
        mean, worst = (-less for less in _less(values, OURS, ORACLE))
        found.append(_figure(f"{title}: above the oracle", mean, "<= 10" if base else None, mean <= 10.0))
        found.append(_figure(f"{title}: above the oracle, worst seed", worst, None, False))
        bound, _ = _less(values, ORACLE, HINDSIGHT)
        found.append(_figure(f"{title}: less time of the oracle than the best static plan", bound, None, False))
    return found


def _figure(name: str, value: float, goal: str | None, holds: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "%", "goal": goal, "holds": None if goal is None else holds}


def table(raw: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Returns seconds per batch of all contenders."""
    columns = (CHAIN, EVEN, WAVES, STATIC, HINDSIGHT, SHARES, OURS, ORACLE)
    lines = ["| seconds per batch | " + " | ".join(columns) + " | moves | rolled back | paused |"]
    lines.append("|---" * (len(columns) + 4) + "|")
    for name, values in raw.items():
        cells = [f"{np.mean(values[c]):.2f}" for c in columns]
        cells += [
            f"{np.mean(values['moves']):.3g}",
            f"{np.mean(values['rollbacks']):.3g}",
            f"{100 * np.mean(values['paused']):.1f} %",
        ]
        lines.append(f"| {SCENARIOS[name].title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
