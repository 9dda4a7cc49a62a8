"""Pictures of what is measured besides the engines' gains."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.pictures.charts import Bar, Group, groups
from benchmarks.pictures.engines import COLOURS
from benchmarks.pictures.sheet import Picture
from benchmarks.results import Results


def joint(results: Results) -> Picture:
    """What the controller makes of real processes, and what stands still, to the oracle."""
    others = {"static plan + shares": "r5", "best static plan": "r6", "even chain": "idle"}
    rows: list[Group] = []
    for case in results.cases(": above the oracle"):
        ratio = 1.0 + results[f"{case}: above the oracle"] / 100.0
        found = [Bar(COLOURS["pipeline"], ratio, f"{ratio:.2f}")]
        for name, kind in others.items():
            less = f"{case}: less time than {name}"
            if less in results:
                theirs = ratio / (1.0 - results[less] / 100.0)
                found.append(Bar(kind, theirs, f"{theirs:.2f}"))
        rows.append(Group(name=case, bars=found))
    return Picture(
        title="Devices change while a pipeline trains: time over the oracle's",
        legend=[(COLOURS["pipeline"], "online controller"), *((kind, name) for name, kind in others.items())],
        panels=[("", groups(rows, label="scenarios", marks=[(1.0, "oracle")]))],
        source="Real processes, emulated devices and links. The oracle takes the best plan known in every state at"
        " once and moves for nothing; the best static plan is chosen in hindsight. benchmarks/joint/results.json",
    )


def planner(results: Results) -> Picture:
    """Planned over measured steps on emulated devices."""
    rows: dict[str, list[Bar]] = {}
    for case in results.cases(": planned / measured"):
        devices, _, engine = case.rpartition(", ")
        kind = COLOURS.get("stock DDP" if engine == "ddp" else engine, "idle")
        ratio = results[f"{case}: planned / measured"]
        rows.setdefault(devices, []).append(Bar(kind, ratio, f"{ratio:.2f} {engine}"))
    return Picture(
        title="lightning-hetero-plan: planned over measured step",
        panels=[("", groups([Group(name=name, bars=found) for name, found in rows.items()], label="planned",
                            marks=[(1.0, "as measured")]))],
        source="Four emulated devices. Loading, the optimizer and the framework are in"
        " the measured steps, not in the planned ones. benchmarks/planner/results.json",
    )  # fmt: skip


def peers(results: Results) -> Picture:
    """How much sooner than stock DDP each peer reaches a validation loss."""
    ends = ": that time to stock DDP's"
    found: dict[str, list[Group]] = {}
    for case in results.cases(ends):
        cluster, _, peer = case.partition(", ")
        kind = COLOURS.get(peer.removeprefix("ours: "), "idle")
        times = 1.0 / results[case + ends]
        found.setdefault(cluster, []).append(Group(name=peer, bars=[Bar(kind, times, f"{times:.2f}")]))
    return Picture(
        title="Times as fast as stock DDP to the same validation loss, ours and others",
        panels=[(f"Devices: {cluster}", _at_one(rows, "stock DDP")) for cluster, rows in found.items()],
        source="Real processes on four emulated devices, medians over seeds of those that came there with every seed;"
        " what each changes in the recipe: benchmarks/peers/results.md",
    )


def _at_one(rows: Sequence[Group], name: str) -> str:
    return groups(rows, label=name, marks=[(1.0, name)])
