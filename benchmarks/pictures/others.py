"""Pictures of what is measured besides the engines' gains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.pictures.charts import Bar, Group, Span, groups, spans
from benchmarks.pictures.engines import COLOURS
from benchmarks.pictures.sheet import Picture
from benchmarks.results import Results
from lightning_hetero.report.page.charts import Bar as Stacked
from lightning_hetero.report.page.charts import bars

__all__ = ["drop_in", "joint", "narx", "peers", "planner", "planning_real",
           "replanning", "transport"]  # fmt: skip


def _bar(results: Results, figure: str, kind: str, form: str = "{:.2f}") -> Bar:
    """A figure's bar, with its goal if that is missed."""
    goal = f", goal {_words(results.figures[figure]['goal'])}" if results.missed(figure) else ""
    return Bar(kind, results[figure], form.format(results[figure]) + goal, bool(goal))


def _words(goal: str) -> str:
    return goal.replace("<= ", "≤ ").replace(">= ", "≥ ")


def joint(results: Results) -> Picture:
    """What the controller makes of real processes, and what stands still, to the oracle."""
    others = {"static plan + shares": "r5", "best static plan": "r6", "even chain": "idle"}
    rows: list[Group] = []
    for case in results.cases(": above the oracle"):
        if not case.startswith("real: "):
            continue
        ratio = 1.0 + results[f"{case}: above the oracle"] / 100.0
        found = [Bar(COLOURS["pipeline"], ratio, f"{ratio:.2f}")]
        for name, kind in others.items():
            less = f"{case}: less time than {name}"
            if less in results:
                theirs = ratio / (1.0 - results[less] / 100.0)
                text = f"{theirs:.2f}" + (", goal missed" if results.missed(less) else "")
                found.append(Bar(kind, theirs, text, results.missed(less)))
        rows.append(Group(name=case.removeprefix("real: "), bars=found))
    return Picture(
        title="Devices change while a pipeline trains: time over the oracle's",
        legend=[(COLOURS["pipeline"], "online controller"), *((kind, name) for name, kind in others.items())],
        panels=[("", groups(rows, label="scenarios", marks=[(1.0, "oracle")]))],
        source="Real processes, emulated devices and links. The oracle takes the best plan known in every state at"
        " once and moves for nothing; the best static plan is chosen in hindsight. benchmarks/joint/results.json",
    )


def replanning(results: Results) -> Picture:
    """Steps after devices have changed, to the ideal."""
    kinds = {"ours": "r2", "balanced": "r0", "ours, first plan kept": "r5", "stock DDP": "idle"}
    rows = [
        Group(name=name, bars=[_bar(results, f"healing, {engine}{state}: step / ideal", kind)
                               for engine, kind in kinds.items()])
        for name, state in (("from a wrong first plan", ""), ("after speeds are reversed", ", reversed"))
    ]  # fmt: skip
    pauses = [
        Group(name=f"{case.removeprefix('pause, ')} of layers and their state",
              bars=[_bar(results, f"{case}: the move / allowed", "r2")])
        for case in results.cases(": the move / allowed")
    ]  # fmt: skip
    return Picture(
        title="A pipeline that is planned again while it trains: step over the ideal step",
        legend=[("r2", "hetero_pipeline"), ("r0", "hetero_balanced"), ("r5", "first plan kept"), ("idle", "stock DDP")],
        panels=[
            ("Step over the ideal", groups(rows, label="healing", marks=[(1.0, "ideal")])),
            ("Moving layers, over the time allowed", groups(pauses, label="pause", marks=[(1.0, "allowed")])),
        ],
        source="Medians. Four processes share two cores. Allowed: 1.5 times the bytes' time by gloo plus 50 ms. Missed"
        " goals in red. benchmarks/replanning/results.json",
    )


def planning_real(results: Results) -> Picture:
    """Predicted over measured, by engine."""
    kinds = {
        "own work, processor time": "own work, by processor time",
        "own work": "own work, by the wall clock",
        "step": "whole step, by the wall clock",
    }
    panels: list[tuple[str, str]] = []
    for kind, heading in kinds.items():
        rows: list[Span] = []
        for engine in ("balanced", "stale", "pipeline", "pipeline, one chain"):
            name = f"all models, {engine}: {kind}, predicted / measured, "
            if name + "median" in results:
                values = (results[name + which] for which in ("least", "median", "greatest"))
                rows.append(Span(engine, COLOURS[engine.split(",")[0]], *values))
        panels.append((f"Predicted over measured: {heading}", spans(rows, label=kind, marks=[(1.0, "exact")])))
    return Picture(
        title="How well own work and steps are predicted",
        panels=panels,
        source="Real work, nothing emulated: MLPs, CNNs and GPTs of two sizes, two ranks with a core each. Dot: median"
        " of the six models; line: least to greatest. What the framework and other programs take is in no"
        " prediction. benchmarks/planning_real/results.json",
    )


def planner(results: Results) -> Picture:
    """Planned over measured steps on emulated devices."""
    rows: dict[str, list[Bar]] = {}
    for case in results.cases(": planned / measured"):
        devices, _, engine = case.rpartition(", ")
        kind = COLOURS.get("stock DDP" if engine == "ddp" else engine, "idle")
        bar = _bar(results, f"{case}: planned / measured", kind)
        rows.setdefault(devices, []).append(bar._replace(text=f"{bar.text.partition(',')[0]} {engine}"))
    return Picture(
        title="lightning-hetero-plan: planned over measured step",
        panels=[("", groups([Group(name=name, bars=found) for name, found in rows.items()], label="planned",
                            marks=[(0.9, "0.9"), (1.1, "1.1")]))],
        source="Four emulated devices; goal 0.9 to 1.1, missed in red. Loading, the optimizer and the framework are in"
        " the measured steps, not in the planned ones. benchmarks/planner/results.json",
    )  # fmt: skip


def transport(results: Results) -> Picture:
    """A round of gradients and parameters through the server to an all_reduce."""
    rows = [
        Group(name=f"{size} parameters", bars=[
            _bar(results, f"{size}, {way} : all_reduce, median of paired ratios", kind)
            for way, kind in (("shared memory", "r1"), ("pairs", "r4"))
        ])
        for size in (case.removesuffix(", all_reduce") for case in results.figures if case.endswith(", all_reduce"))
    ]  # fmt: skip
    return Picture(
        title="Gradients to the server and parameters back, over the time of an all_reduce",
        legend=[("r1", "shared memory, one node"), ("r4", "pairs, meant for other nodes")],
        panels=[("", groups(rows, label="rounds", marks=[(1.0, "all_reduce (gloo)")]))],
        source="Four workers on one node, pairs over the loopback; medians. Goal with 25 million parameters: at most"
        " 0.5. benchmarks/transport/results.json",
    )


def narx(results: Results) -> Picture:
    """Errors and times of the predictor that is told the host's load, to the Kalman filter's."""
    rows = [
        Group(name=case, bars=[
            _bar(results, f"{case}: error, narx over kalman", "work"),
            _bar(results, f"{case}: time, narx over kalman", "exchange"),
        ])
        for case in results.cases(": error, narx over kalman")
    ]  # fmt: skip
    return Picture(
        title="NARX, a predictor that is told the host's load, over the Kalman filter",
        legend=[("work", "error one step ahead"), ("exchange", "time of training")],
        panels=[("", groups(rows, label="series", marks=[(1.0, "kalman")]))],
        source="Generated series, four ranks in a closed loop, simulated; missed goals in red."
        " benchmarks/narx/results.json",
    )


def drop_in(results: Results) -> Picture:
    """Lightning's own tests under our classes."""
    rows: list[Stacked] = []
    for case in results.cases(": refused"):
        (passed,) = [name for name in results.figures if name.startswith(f"{case}: passed of ")]
        counts = [results[passed], results[f"{case}: refused"], results[f"{case}: failed"]]
        whole = math.fsum(counts)
        parts = [(kind, count / whole) for kind, count in zip(("r2", "exchange", "hot"), counts, strict=True)]
        name = case.replace("1 rank(s)", "1 rank").replace("rank(s)", "ranks")
        rows.append(Stacked(name=name, parts=parts, text=" / ".join(f"{count:.0f}" for count in counts)))
    return Picture(
        title="Lightning's own tests with our classes in the place of DDPStrategy",
        legend=[("r2", "passed"), ("exchange", "refused"), ("hot", "failed")],
        panels=[("passed / refused / failed", bars(rows, label="tests"))],
        source="Lightning's tests of trainer, loops, callbacks and checkpoints; each that did not pass is listed with"
        " its reason in benchmarks/drop_in/results.md",
    )


def peers(results: Results) -> Picture:
    """Time to a validation loss, by peer."""
    ends = ": that time to stock DDP's"
    found: dict[str, list[Group]] = {}
    for case in results.cases(ends):
        cluster, _, peer = case.partition(", ")
        kind = COLOURS.get(peer.removeprefix("ours: "), "idle")
        found.setdefault(cluster, []).append(Group(name=peer, bars=[_bar(results, case + ends, kind)]))
    return Picture(
        title="Time to the same validation loss over stock DDP's, ours and others",
        panels=[(f"Devices: {cluster}", _at_one(rows, "stock DDP")) for cluster, rows in found.items()],
        source="Real processes on four emulated devices, medians over seeds of those that came there with every seed;"
        " what each changes in the recipe: benchmarks/peers/results.md",
    )


def _at_one(rows: Sequence[Group], name: str) -> str:
    return groups(rows, label=name, marks=[(1.0, name)])
