"""``python -m benchmarks.planner [--quick] [--repeats N] [--only WORDS]``: steps as planned, and those of real ranks.

- *Emulated devices*: four ranks, 16 samples each. The planner is told what a user would tell it: a module, which it
  measures, a probe's links, the devices' speeds; the module's times are the emulation's (9 ms per sample and 18 ms per
  step). Then the ranks train as its overrides say; a step is the median behind the first ten, of the stale engine the
  mean.
- *Real work*: MLPs, CNNs and GPTs on two ranks, a core for each, nothing emulated and nothing told. `AutoStrategy`
  tries the model; each engine's step as the planner has it from that trial (a pipeline's from what it has measured
  itself), against the mean step behind the first ten. *printed*: of the line of `AutoStrategy`.
- *Bookkeeping*: the constants of `lightning_hetero.cluster.engine_times.LOOPS`, measured again.
- *Published set-ups*, see `published`: theirs, what the planner says, and what ranks on devices emulated by the same
  inputs take.
- How much processor time the planner itself takes, for up to 1,024 devices, of three speeds or all different.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.kit.figures import DASH, Figure, figure, markdown, named
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.planner.cases import CASES, PER_RANK, Case, Net
from benchmarks.planner.models import MODELS
from benchmarks.planner.published import BOOKKEEPING, CONTENDED, CONTENDED_SOURCE, ENGINES, SETUPS, contended, steps_s
from benchmarks.ranks import launch
from lightning_hetero.cli.loading import profile_module
from lightning_hetero.cli.ranks import probe_machine
from lightning_hetero.cluster.spec import cluster_from_plain, override_cluster
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.pipeline.decide.plans import emulated
from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.plan.planner import ENGINES as PLANNED
from lightning_hetero.plan.planner import Plan, plan
from lightning_hetero.plan.setup import Setup
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.types import Cluster, ModelCost

WORKER = "benchmarks.planner.worker"
WITHIN, WITHIN_REAL = 0.10, 0.15
REAL = ("ddp", "balanced", "stale", "pipeline")
SIZES = (16, 64, 256, 1024)  # devices, for processor time
TIMES = "processor time"
NOTES = (
    "Emulated work is sleep, real work included; gloo, on the cores named below. Of emulated devices, loading data, the"
    " optimizer and the framework are in the measured steps and in none of the planned ones. Medians over the repeats."
    " The devices that are only planned for: nodes of eight, three speeds or all different, a GPT of 24 layers."
)


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


def measure(case: Case, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Trains as planned; returns each engine's steps, planned and taken, by name."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        profile = profile_module(Net(), None, accelerator="cpu").model
        links, _ = probe_machine(devices=len(case.scenario.speeds), accelerator="cpu")
        answer = planned(case, profile, links)
        pipelined = next((e.plan for e in answer.estimates if e.plan is not None), None)
        setting = {"name": case.name, "engines": case.engines, "profile": model_to_plain(profile)}
        setting["plan"] = None if pipelined is None else plan_to_plain(pipelined)
        runs = launch(WORKER, len(case.scenario.speeds), json.dumps(setting))
        for estimate in answer.estimates:
            one = {**runs[estimate.engine], "planned_s": estimate.step_s, "bound_s": estimate.bound_s}
            found.setdefault(estimate.engine, []).append(one)
    return found


def measure_published(name: str, repeats: int, quick: bool) -> dict[str, list[dict[str, float]]]:
    """Runs a published set-up; returns the same as `measure`."""
    found: dict[str, list[dict[str, float]]] = {}
    one = next((one for one in SETUPS if one.name == name), None)
    ranks = 4 if one is None else one.make().ranks
    for _ in range(repeats):
        runs = launch(WORKER, ranks, json.dumps({"name": name, "quick": quick}))
        if one is None:
            fixed_s, per_sample_s = runs["alone"]
            planned_s = steps_s(contended(max(0.0, fixed_s), per_sample_s, runs["global_batch"]))
        else:
            planned_s = one.planned_s()
        for engine in ENGINES:
            found.setdefault(engine, []).append({**runs[engine], "planned_s": planned_s[engine]})
    return found


def measure_real(name: str, repeats: int, quick: bool) -> list[dict[str, Any]]:
    """Trains a model by every engine; returns what came of it, one per repeat."""
    setting = {"name": name, "real": True, "engines": REAL, "quick": quick}
    return [launch(WORKER, 2, json.dumps(setting)) for _ in range(repeats)]


def large(ranks: int) -> Setup:
    """Returns so many devices of three speeds on nodes of eight, and a GPT."""
    devices = [{"speed": v, "mem": "40 GB", "count": n} for v, n in ((1.0, 4), (0.5, 2), (0.25, 2))]
    inside = {"bandwidth": "50 GB/s", "latency": "5 us"}
    nodes = [{"name": "node", "count": ranks // 8, "devices": devices, "link": inside}]
    cluster = cluster_from_plain({"nodes": nodes, "link": {"bandwidth": "12 GB/s", "latency": "20 us"}})
    sizes = {"kind": "transformer", "layers": 24, "width": 1024, "window": 1024}
    sizes |= {"vocabulary": 50257, "flops_per_s": 6e13}
    return Setup(cluster=cluster, model=model_from_formula(sizes), global_batch=4 * len(cluster.devices))


def different(setup: Setup) -> Setup:
    """Returns the set-up with a speed of its own for each device, 0.2 to 1."""
    golden = 0.5 * (math.sqrt(5.0) - 1.0)
    speeds = [0.2 + 0.8 * (rank * golden % 1.0) for rank in range(setup.ranks)]
    return replace(setup, cluster=override_cluster(setup.cluster, speeds=speeds))


def processor(quick: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the processor time of each estimate, by kinds of devices, their number, and engine [s]."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for ranks in SIZES[:1] if quick else SIZES:
        few = large(ranks)
        for kinds, setup in (("three speeds", few), ("all different", different(few))):
            for name, estimate in PLANNED.items():
                started_s = time.process_time()
                estimate(setup)
                taken_s = time.process_time() - started_s
                found.setdefault(kinds, {}).setdefault(str(ranks), {})[name] = taken_s
    return found


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each case."""
    found: dict[str, Any] = {case.name: partial(measure, case, repeats) for case in CASES[: 1 if quick else None]}
    names = [one.name for one in SETUPS] + [CONTENDED]
    found |= {name: partial(measure_published, name, repeats, quick) for name in (names[1:2] if quick else names)}
    found |= {model.name: partial(measure_real, model.name, repeats, quick) for model in MODELS[:: 6 if quick else 1]}
    if not quick:
        found[BOOKKEEPING] = partial(launch, WORKER, 2, json.dumps({"name": BOOKKEEPING}))
    return {**found, TIMES: partial(processor, quick)}


def _planned(name: str, engines: dict[str, list[dict[str, float]]]) -> list[Figure]:
    """Returns planned over measured of each engine, medians over the repeats."""
    found: list[Figure] = []
    for engine, runs in engines.items():
        put = named(f"{name}, {engine}")
        found.append(put("step", 1e3 * statistics.median(run["step_s"] for run in runs), "ms"))
        ratio = statistics.median(run["planned_s"] / run["step_s"] for run in runs)
        found.append(put("planned / measured", ratio, "x", within=WITHIN))
        if "taken" in runs[0]:
            found.append(put("emulated work, taken / wanted", max(run["taken"] for run in runs), "x"))
    return found


def _real(model: str, runs: list[dict[str, Any]]) -> list[Figure]:
    """Returns planned over measured of each engine, and of what `AutoStrategy` has printed."""
    found: list[Figure] = []
    for engine in runs[0]:
        put = named(f"{model}, {'auto, printed' if engine == 'auto' else engine}")
        found.append(put("step", 1e3 * statistics.median(run[engine]["step_s"] for run in runs), "ms"))
        ratio = statistics.median(run[engine]["planned_s"] / run[engine]["step_s"] for run in runs)
        found.append(put("planned / measured", ratio, "x", within=WITHIN_REAL))
    gain = statistics.median(run["auto"]["planned_gain"] / run["auto"]["gain"] for run in runs)
    name = f"{model}, auto, printed: times as fast as DDP, planned / measured"
    return [*found, figure(name, gain, "x", within=WITHIN_REAL)]


def gains(runs: dict[str, list[dict[str, float]]]) -> tuple[float, float]:
    """Returns DDP's step over the balanced engine's, as planned and as measured."""
    both = ({e: statistics.median(run[key] for run in runs[e]) for e in ENGINES} for key in ("planned_s", "step_s"))
    planned_s, step_s = both
    return planned_s["ddp"] / planned_s["balanced"], step_s["ddp"] / step_s["balanced"]


def published_table(found: Raw) -> str:
    """Returns theirs beside ours, in Markdown."""
    rows: list[list[str]] = []
    known = {one.name: (one.source, one.theirs) for one in SETUPS} | {CONTENDED: (CONTENDED_SOURCE, DASH)}
    for name, (source, theirs) in known.items():
        if name in found:
            steps = [
                " / ".join(f"{1e3 * statistics.median(run[key] for run in found[name][e]):.0f}" for e in ENGINES)
                for key in ("planned_s", "step_s")
            ]
            planned_gain, gain = gains(found[name])
            rows.append([name, source, theirs, f"{steps[0]}: {planned_gain:.2f}", f"{steps[1]}: {gain:.2f}"])
    head = ["set-up", "source of the inputs", "theirs", "planner says [ms, DDP / balanced: times as fast]", "measured"]
    return markdown(head, rows)


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    figures: list[Figure] = []
    for kinds, by_ranks in found.get(TIMES, {}).items():
        for ranks, engines in by_ranks.items():
            total_s = math.fsum(engines.values())
            figures.append(figure(f"{TIMES}, {ranks} devices, {kinds}: all engines", total_s, "s"))
    steps = {case.name: found[case.name] for case in CASES if case.name in found}
    published = {name: found[name] for name in (*(one.name for one in SETUPS), CONTENDED) if name in found}
    for name, engines in {**steps, **published}.items():
        figures += _planned(name, engines)
    for name, runs in published.items():
        planned_gain, gain = gains(runs)
        figures.append(figure(f"{name}: times as fast as DDP, planner", planned_gain, "x"))
        figures.append(figure(f"{name}: times as fast as DDP, measured", gain, "x"))
    real = {model.name: found[model.name] for model in MODELS if model.name in found}
    for name, runs in real.items():
        figures += _real(name, runs)
    for engine, ratios in found.get(BOOKKEEPING, {}).items():
        name = f"{engine}: processor time of a step of nothing, over Lightning's on one device"
        figures.append(figure(name, statistics.median(ratios), "x"))
    raw = {"processor_s": found.get(TIMES, {}), "steps": steps, "published": published, "real": real}
    return figures, raw, f"{NOTES}\n\n{published_table(found)}" if published else NOTES


BENCHMARK = Benchmark(
    name="planner", title="Planned against measured steps, and published set-ups", repeats=1, cases=cases, report=report
)

if __name__ == "__main__":
    BENCHMARK.main()
