"""``python -m benchmarks.planner [--quick] [--repeats N] [--planning]``: steps as planned, against those of real ranks.

Four ranks on emulated devices, 16 samples each. The planner is told what a user would tell it: a module, which it
measures, a probe's links, the devices' speeds; the module's times are the emulation's (9 ms per sample and 18 ms per
step). Then the ranks train as its overrides say; a step is the median behind the first ten, of the stale engine the
mean. And how long the planner itself takes, for up to 1,024 devices: by a clock, and processor time, for devices of
three speeds and for devices that are all different. ``--planning``: processor time only, nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner.cases import CASES, PER_RANK, Case, Net
from benchmarks.report import write_results
from benchmarks.torchrun import launch
from lightning_hetero.cli.loading import profile_module
from lightning_hetero.cli.ranks import probe_machine
from lightning_hetero.cluster.spec import cluster_from_plain, override_cluster
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.pipeline.decide.plans import emulated
from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.plan.planner import ENGINES, Plan, plan
from lightning_hetero.plan.setup import Setup
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.types import Cluster, ModelCost

HERE = Path(__file__).parent
WITHIN = 0.10
GOAL = "0.9 to 1.1"
SIZES = (16, 128, 1000)  # devices
CPU_SIZES = (16, 64, 256, 1024)  # devices, for processor time


def planned(case: Case, profile: ModelCost, links: Cluster) -> Plan:
    """Returns what the planner says of a case."""
    model = emulated(profile, case.scenario)
    ranks = len(case.scenario.speeds)
    parts = (model.before, *model.layers, model.head)
    batch = PER_RANK * ranks
    whole = math.fsum(part.state_bytes + batch * part.activation_bytes for part in parts)
    caps = None if case.holds is None else [case.holds * whole] * ranks
    if case.holds is not None:  # the state alone is more than a device holds
        model = replace(model, layers=tuple(replace(c, state_bytes=whole / len(model.layers)) for c in model.layers))
    cluster = override_cluster(links, speeds=case.scenario.speeds, mem_bytes=caps)
    return plan(Setup(cluster=cluster, model=model, global_batch=batch), case.engines)


def measured(case: Case, answer: Plan, profile: ModelCost) -> dict[str, Any]:
    """Trains as planned; returns each engine's step, by name."""
    pipelined = next((e.plan for e in answer.estimates if e.plan is not None), None)
    setting = {"case": case.name, "profile": model_to_plain(profile)}
    setting["plan"] = None if pipelined is None else plan_to_plain(pipelined)
    return launch("benchmarks.planner.worker", len(case.scenario.speeds), json.dumps(setting))


def large(ranks: int) -> Setup:
    """Returns so many devices of three speeds on nodes of eight, and a GPT."""
    devices = [{"speed": v, "mem": "40 GB", "count": n} for v, n in ((1.0, 4), (0.5, 2), (0.25, 2))]
    nodes = [
        {"name": "node", "count": ranks // 8, "devices": devices, "link": {"bandwidth": "50 GB/s", "latency": "5 us"}}
    ]
    cluster = cluster_from_plain({"nodes": nodes, "link": {"bandwidth": "12 GB/s", "latency": "20 us"}})
    sizes = {
        "kind": "transformer",
        "layers": 24,
        "width": 1024,
        "window": 1024,
        "flops_per_s": 6e13,
        "vocabulary": 50257,
    }
    return Setup(cluster=cluster, model=model_from_formula(sizes), global_batch=4 * len(cluster.devices))


def timed(sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Returns how long each estimate takes, by number of devices and engine [s]."""
    found: dict[str, dict[str, float]] = {}
    for ranks in sizes:
        setup = large(ranks)
        for name, estimate in ENGINES.items():
            started_s = time.perf_counter()
            estimate(setup)
            found.setdefault(str(ranks), {})[name] = time.perf_counter() - started_s
    return found


def different(setup: Setup) -> Setup:
    """Returns the set-up with a speed of its own for each device, 0.2 to 1."""
    golden = 0.5 * (math.sqrt(5.0) - 1.0)
    speeds = [0.2 + 0.8 * (rank * golden % 1.0) for rank in range(setup.ranks)]
    return replace(setup, cluster=override_cluster(setup.cluster, speeds=speeds))


def processor(sizes: tuple[int, ...]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the processor time of each estimate, by kinds of devices, their number, and engine [s]."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for ranks in sizes:
        few = large(ranks)
        for kinds, setup in (("three speeds", few), ("all different", different(few))):
            for name, estimate in ENGINES.items():
                started_s = time.process_time()
                estimate(setup)
                taken_s = time.process_time() - started_s
                found.setdefault(kinds, {}).setdefault(str(ranks), {})[name] = taken_s
    return found


def figures(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns planned / measured of each case and engine, medians over the repeats, and the planner's own times."""
    found: list[dict[str, Any]] = []

    def figure(name: str, value: float, unit: str, goal: str | None = None, holds: bool | None = None) -> None:
        found.append({"name": name, "value": value, "unit": unit, "goal": goal, "holds": holds})

    for kinds, by_ranks in raw.get("processor_s", {}).items():
        for ranks, engines in by_ranks.items():
            for engine, seconds in engines.items():
                figure(f"processor time, {ranks} devices, {kinds}: {engine}", seconds, "s")
            total_s = math.fsum(engines.values())
            figure(f"processor time, {ranks} devices, {kinds}: all engines", total_s, "s")
    for case, engines in raw.get("steps", {}).items():
        for engine, runs in engines.items():
            step_s = statistics.median(run["step_s"] for run in runs)
            ratio = statistics.median(run["planned_s"] / run["step_s"] for run in runs)
            figure(f"{case}, {engine}: step", 1e3 * step_s, "ms")
            figure(f"{case}, {engine}: planned / measured", ratio, "x", GOAL, abs(ratio - 1.0) <= WITHIN)
            figure(f"{case}, {engine}: emulated work, taken / wanted", max(run["taken"] for run in runs), "x")
    for ranks, engines in raw.get("planning_s", {}).items():
        for engine, seconds in engines.items():
            figure(f"planning {engine} on {ranks} devices", seconds, "s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case, one repeat, few devices; see --out")
    parser.add_argument("--repeats", type=int, default=1, help="trainings of each case")
    parser.add_argument(
        "--out", type=Path, help="folder for results.json, results.md; else this one, .cache if quick"
    )
    parser.add_argument(
        "--planning", action="store_true", help="processor time of the planner alone; results are not kept"
    )
    args = parser.parse_args()
    cases = CASES[:1] if args.quick else CASES
    raw: dict[str, Any] = {"processor_s": processor(CPU_SIZES[:2] if args.quick else CPU_SIZES)}
    if not args.planning:
        _rest(raw, cases, args.quick, args.repeats)
    notes = (
        "Emulated work is sleep, real work included; gloo, four ranks on the cores named below. Loading data, the"
        " optimizer and the framework are in the measured steps and in none of the planned ones. Medians over the"
        " repeats. The devices that are only planned for: nodes of eight, three speeds or all different, a GPT of 24"
        " layers."
    )
    write_results(
        args.out or (HERE / ".cache" / HERE.name if args.quick or args.planning else HERE),
        title="Planned against measured steps, emulated devices",
        figures=figures(raw),
        raw=raw,
        notes=notes,
    )


def _rest(raw: dict[str, Any], cases: tuple[Case, ...], quick: bool, repeats: int) -> None:
    """Trains as planned, and takes the planner's time by a clock."""
    raw["steps"] = {}
    for _ in range(1 if quick else repeats):
        profile = profile_module(Net(), None, accelerator="cpu").model
        for case in cases:
            links, _ = probe_machine(devices=len(case.scenario.speeds), accelerator="cpu")
            answer = planned(case, profile, links)
            runs = measured(case, answer, profile)
            for estimate in answer.estimates:
                one = {**runs[estimate.engine], "planned_s": estimate.step_s, "bound_s": estimate.bound_s}
                raw["steps"].setdefault(case.name, {}).setdefault(estimate.engine, []).append(one)
    raw["planning_s"] = timed(SIZES[:1] if quick else SIZES)


if __name__ == "__main__":
    main()
