"""A picture per engine: what it gains against stock DDP, or against what it is an alternative to."""

from __future__ import annotations

import statistics

from benchmarks.pictures.charts import Bar, Group, groups
from benchmarks.pictures.sheet import Picture
from benchmarks.results import Results
from lightning_hetero.report.page.charts import Line, lines

COLOURS = {"stock DDP": "idle", "balanced": "r0", "stale": "r1", "pipeline": "r2", "auto": "r3"}
"""Of the engines, in all pictures."""

CLUSTERS = {"equal": "4 equal ranks", "spells": "slow spells (6x slower, a quarter of the time)"}


def _at_least(results: Results, figure: str) -> float:
    """Returns the number of a goal ``>= number``."""
    return float(results.figures[figure]["goal"].removeprefix(">= "))


def balanced(results: Results) -> Picture:
    """A step of the balanced engine to one of stock DDP, and the ideal."""
    unequal: list[Group] = []
    for case in sorted(results.cases(": speed-up over DDP"), key=lambda case: int(case.split()[0])):
        ratio = 1.0 / results[f"{case}: speed-up over DDP"]
        ideal = results[f"{case}: ideal step"] / results[f"{case}: stock DDP step"]
        net, saved = f"{case}: fraction of ideal, net", f"{case}: time saved over DDP"
        behind: list[str] = []
        if results.missed(saved):
            behind.append(f"goal {1.0 - _at_least(results, saved) / 100.0:.2f}")
        if results.missed(net):
            behind.append(f"goal {_at_least(results, net):g} of ideal")
        text = ", ".join([f"{ratio:.2f}", *behind])
        unequal.append(Group(name=case, bars=[Bar("r0", ratio, text, bool(behind))], tick=ideal))
    equal: list[Group] = []
    for case in results.cases(": ours / DDP"):
        figure = f"{case}: ours / DDP"
        goal = str(results.figures[figure]["goal"]).removeprefix("<= ")
        text = f"{results[figure]:.2f}" + (f", goal {goal}" if results.missed(figure) else "")
        equal.append(Group(name=case, bars=[Bar("r0", results[figure], text, results.missed(figure))]))
    mark = [(1.0, "stock DDP")]
    return Picture(
        title="Step of hetero_balanced over the step of stock DDP",
        legend=[("r0", "hetero_balanced"), ("tick", "ideal: global batch / sum of speeds")],
        panels=[
            ("Emulated clusters", groups(unequal, label="unequal devices", marks=mark)),
            ("Equal devices, short steps: what it costs", groups(equal, label="equal devices", marks=mark)),
        ],
        source="Medians of five repeats; missed goals in red. Of ideal: without what a step of stock DDP costs"
        " beyond its own theory. benchmarks/balanced/results.json",
    )


def stale(results: Results) -> Picture:
    """Whole trainings to stock DDP's, both tasks."""
    every = {(row["task"], row["cluster"], row["engine"]): row for row in results.raw["real"]}
    panels: list[tuple[str, str]] = []
    for task in dict.fromkeys(task for task, _, _ in every):
        rows: list[Group] = []
        for cluster in dict.fromkeys(str(cluster) for _, cluster, _ in every):
            found = {name: every.get((task, cluster, engine)) for name, engine in (("balanced", "balanced"),
                                                                                   ("stale", "flexible"))}  # fmt: skip
            bars = [
                Bar(COLOURS[name], row["to_ddp"], f"{row['to_ddp']:.2f}, loss {row['loss_to_ddp']:.2f}")
                for name, row in found.items()
                if row is not None and row["to_ddp"] is not None
            ]
            if bars:
                rows.append(Group(name=CLUSTERS.get(cluster, cluster), bars=bars))
        panels.append((f"Training time to stock DDP's: {task}", groups(rows, label=task, marks=[(1.0, "stock DDP")])))
    return Picture(
        title="Time and final loss of the same recipe over stock DDP's",
        legend=[(COLOURS["balanced"], "hetero_balanced"), (COLOURS["stale"], "hetero_stale")],
        panels=panels,
        source="Real processes on four emulated devices, as many updates of the same global batch; medians of three"
        " seeds. Where a rank is killed, stock DDP's job ends and there is no ratio. benchmarks/stale/results.json",
    )


def pipeline(results: Results) -> Picture:
    """Steps of our plan to the best even pipeline's, and to stock DDP's where the model fits."""
    rows: list[Group] = []
    for case in results.cases(": modelled / measured"):
        rest, even = results.starting(f"{case}: less time than the best even pipeline (even, ")
        figure = f"{case}: less time than the best even pipeline (even, {rest}"
        chain = f"{case}: less time than the even chain"
        behind = [
            f"goal {1.0 - _at_least(results, name) / 100.0:.2f}{of}"
            for name, of in ((figure, ""), (chain, " of the even chain"))
            if name in results and results.missed(name)
        ]
        ratio = 1.0 - even / 100.0
        bars = [Bar("r2", ratio, ", ".join([f"{ratio:.2f}", *behind]), bool(behind))]
        ddp = f"{case}, Lightning: less time than stock DDP"
        if ddp in results:
            ratio = 1.0 - results[ddp] / 100.0
            bars.append(Bar("idle", ratio, f"{ratio:.2f} of stock DDP's step"))
        rows.append(Group(name=case, bars=bars))
    return Picture(
        title="Step of hetero_pipeline over that of the best even pipeline",
        legend=[("r2", "to the best even pipeline"), ("idle", "to stock DDP, where the model fits")],
        panels=[("", groups(rows, label="scenarios", marks=[(1.0, "the same time")]))],
        source="Emulated devices and links, the rest is real. Even: 1, 2 or 4 groups with equal shares, the better of"
        " equal layers and equal parameters. Missed goals in red. benchmarks/pipeline/results.json",
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
            reached = f"{results[f'{devices}: {policy}, runs that reach the target']:.0f} of 5 runs"
            ratio = 1.0 if policy == "fedavg" else results[f"{devices}: {policy}, time to target"]
            bars.append(Bar(kind, ratio, f"{ratio:.2f}, {reached}"))
        rows.append(Group(name=f"{devices} speeds", bars=bars))
    return Picture(
        title="Time to 90 % accuracy over fedavg's, data of eight clients not alike",
        legend=[(kind, policy) for policy, kind in policies.items()],
        panels=[
            ("Accuracy by emulated time, steady speeds", lines(curves, label="accuracy", x_name="emulated seconds",
                                                               y_name="%, mean of five seeds", level=90.0)),
            ("Emulated time to 90 % over fedavg's", groups(rows, label="time to target")),
        ],
        source="Digits among eight clients, labels by a Dirichlet distribution of 0.3, speeds 1:1:1:1:1/2:1/2:1/4:1/8."
        " Training is real, time emulated: no network, no Lightning. benchmarks/federated/results.json",
    )  # fmt: skip
