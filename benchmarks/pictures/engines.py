"""A picture per engine: what it gains against stock DDP, or against what it is an alternative to."""

from __future__ import annotations

import statistics

from benchmarks.pictures.charts import Bar, Group, groups
from benchmarks.pictures.sheet import Picture
from benchmarks.results import Results, faster
from lightning_hetero.report.page.charts import Line, lines

COLOURS = {"stock DDP": "idle", "balanced": "r0", "stale": "r1", "pipeline": "r2", "auto": "r3"}
"""Of the engines, in all pictures."""

CLUSTERS = {"equal": "4 equal ranks", "spells": "slow spells (6x slower, a quarter of the time)"}


def balanced(results: Results) -> Picture:
    """How much faster a step of the balanced engine is than one of stock DDP, and the ideal."""
    unequal: list[Group] = []
    for case in sorted(results.cases(": speed-up over DDP"), key=lambda case: int(case.split()[0])):
        times = results[f"{case}: speed-up over DDP"]
        ideal = results[f"{case}: stock DDP step"] / results[f"{case}: ideal step"]
        unequal.append(Group(name=case, bars=[Bar("r0", times, f"{times:.2f} of {ideal:.2f}")], tick=ideal))
    equal: list[Group] = []
    for case in results.cases(": ours / DDP"):
        times = 1.0 / results[f"{case}: ours / DDP"]
        equal.append(Group(name=case, bars=[Bar("r0", times, f"{times:.2f}")]))
    mark = [(1.0, "stock DDP")]
    return Picture(
        title="Steps of hetero_balanced: times as fast as stock DDP's",
        legend=[("r0", "hetero_balanced"), ("tick", "ideal: global batch / sum of speeds")],
        panels=[
            ("Emulated clusters", groups(unequal, label="unequal devices", marks=mark)),
            ("Equal devices, short steps: what it costs", groups(equal, label="equal devices", marks=mark)),
        ],
        source="Medians of three repeats. benchmarks/balanced/results.json",
    )


def stale(results: Results) -> Picture:
    """How much faster whole trainings are than stock DDP's, both tasks."""
    every = {(row["task"], row["cluster"], row["engine"]): row for row in results.raw["real"]}
    panels: list[tuple[str, str]] = []
    for task in dict.fromkeys(task for task, _, _ in every):
        rows: list[Group] = []
        for cluster in dict.fromkeys(str(cluster) for _, cluster, _ in every):
            found = {name: every.get((task, cluster, engine)) for name, engine in (("balanced", "balanced"),
                                                                                   ("stale", "flexible"))}  # fmt: skip
            bars = [
                Bar(COLOURS[name], 1.0 / row["to_ddp"], f"{1.0 / row['to_ddp']:.2f}, loss {row['loss_to_ddp']:.2f}")
                for name, row in found.items()
                if row is not None and row["to_ddp"] is not None
            ]
            if bars:
                rows.append(Group(name=CLUSTERS.get(cluster, cluster), bars=bars))
        panels.append((f"{task}: times as fast as stock DDP", groups(rows, label=task, marks=[(1.0, "stock DDP")])))
    return Picture(
        title="Whole trainings: times as fast as stock DDP, and the final loss over DDP's",
        legend=[(COLOURS["balanced"], "hetero_balanced"), (COLOURS["stale"], "hetero_stale")],
        panels=panels,
        source="Real processes on four emulated devices, as many updates of the same global batch; medians of three"
        " seeds. Where a rank is killed, stock DDP's job ends and there is no ratio. benchmarks/stale/results.json",
    )


def pipeline(results: Results) -> Picture:
    """How much faster steps of our plan are than the best even pipeline's, and than stock DDP's where it fits."""
    rows: list[Group] = []
    for case in results.cases(": modelled / measured"):
        _, even = results.starting(f"{case}: less time than the best even pipeline (even, ")
        bars = [Bar("r2", faster(even), f"{faster(even):.2f}")]
        ddp = f"{case}, Lightning: less time than stock DDP"
        if ddp in results:
            bars.append(Bar("idle", faster(results[ddp]), f"{faster(results[ddp]):.2f} times stock DDP's speed"))
        rows.append(Group(name=case, bars=bars))
    return Picture(
        title="Steps of hetero_pipeline: times as fast as the best even pipeline's",
        legend=[("r2", "as the best even pipeline"), ("idle", "as stock DDP, where the model fits")],
        panels=[("", groups(rows, label="scenarios", marks=[(1.0, "as fast as that")]))],
        source="Emulated devices and links, the rest is real. Even: 1, 2 or 4 groups with equal shares, the better of"
        " equal layers and equal parameters. benchmarks/pipeline/results.json",
    )


def federated(results: Results) -> Picture:
    """Accuracy over emulated time, and the time to the target by policy."""
    policies = {"fedavg": "r6", "lb-bsp": "r0", "adaptive_steps": "r2", "scaled_lr": "r1"}
    curves: list[Line] = []
    for policy, kind in policies.items():
        runs = results.raw["steady"][policy]
        times = [statistics.median(at) for at in zip(*(run["time_s"] for run in runs), strict=True)]
        means = [100.0 * statistics.fmean(at) for at in zip(*(run["accuracy"] for run in runs), strict=True)]
        curves.append(Line(name=policy, kind=kind, x=times, y=means))
    rows: list[Group] = []
    for devices in ("steady", "drifting"):
        bars: list[Bar] = []
        for policy, kind in policies.items():
            reached = results.figures[f"{devices}: {policy}, runs that reach the target"]
            times = 1.0 if policy == "fedavg" else 1.0 / results[f"{devices}: {policy}, time to target"]
            bars.append(Bar(kind, times, f"{times:.2f}, {reached['value']:.0f} {reached['unit']} runs"))
        rows.append(Group(name=f"{devices} speeds", bars=bars))
    return Picture(
        title="Times as fast as fedavg to 90 % accuracy: eight clients with unlike data",
        legend=[(kind, policy) for policy, kind in policies.items()],
        panels=[
            ("Accuracy by emulated time, steady speeds", lines(curves, label="accuracy", x_name="emulated seconds",
                                                               y_name="%, mean of all seeds", level=90.0)),
            ("Times as fast as fedavg to 90 %, emulated", groups(rows, label="time to target")),
        ],
        source="Digits among eight clients, labels by a Dirichlet distribution of 0.3, speeds 1:1:1:1:1/2:1/2:1/4:1/8."
        " Training is real, time emulated: no network, no Lightning. benchmarks/federated/results.json",
    )  # fmt: skip
