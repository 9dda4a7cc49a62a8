"""From raw step times to figures and tables; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kit.figures import TAKEN, Figure, figure, markdown, paired, percentile
from benchmarks.pipeline.plans import CHAIN, STOCK
from benchmarks.pipeline.scenarios import Case

Runs = Sequence[Sequence[float]]
MODELLED, AGREEMENT = 0.95, 0.10
REPLICAS, OVERHEAD, OVERHEAD_EMULATED = 1.03, 1.05, 1.0
WORDS = {"ddp": "stock DDP", "balanced": "balanced", "replicas": "ours, plain DP", "ours": "ours"}


def median_s(runs: Runs) -> float:
    """Returns the median over runs of their median step."""
    return statistics.median(statistics.median(run) for run in runs)


def tail_s(runs: Runs) -> tuple[float, float]:
    """Returns the 95th percentile (nearest rank) and the longest of all steps of all runs."""
    every = [step_s for run in runs for step_s in run]
    return percentile(every, 95), max(every)


def ratio(above: Runs, below: Runs) -> float:
    """Returns the median over pairs of runs, done one after the other, of the ratio of their medians."""
    return paired([statistics.median(run) for run in above], [statistics.median(run) for run in below])


def case_figures(case: Case, raw: Mapping[str, Any]) -> list[Figure]:
    """Holds our plan against the model, the best even pipeline and the even chain."""
    runs, modelled_s = raw["steps_s"], raw["modelled_s"]
    even = {name: times for name, times in runs.items() if name in modelled_s and name != "ours"}
    ours_s = median_s(runs["ours"])
    errors = {name: abs(median_s(runs[name]) / modelled_s[name] - 1.0) for name in modelled_s}
    figures = [
        figure(f"{case.title}: our step", 1e3 * ours_s, "ms"),
        figure(f"{case.title}: modelled / measured", modelled_s["ours"] / ours_s, "", least=MODELLED),
        figure(
            f"{case.title}: largest error of the model, all plans",
            100 * max(errors.values()),
            "%",
            most=100 * AGREEMENT,
        ),
        figure(f"{case.title}: bound / measured", raw["bound_s"] / ours_s, ""),
    ]

    def compare(name: str, words: str, least: float | None) -> None:
        saved = 100 * (1.0 - ratio(runs["ours"], even[name]))
        figures.append(figure(f"{case.title}: less time than {words}", saved, "%", least=least))

    if even:
        best = min(even, key=lambda name: median_s(even[name]))
        compare(best, f"the best even pipeline ({best})", case.less_than_even)
    if CHAIN in even:
        compare(CHAIN, "the even chain", case.less_than_chain)
    if STOCK in runs:
        name = f"{case.title}: the even chain by our walker / by torch.distributed.pipelining"
        figures.append(figure(name, ratio(runs[CHAIN], runs[STOCK]), "x", most=OVERHEAD))
    return figures


def trained_figures(case: Case, raw: Mapping[str, Any]) -> list[Figure]:
    """Holds our engine, under Lightning, against DDP and the balanced engine, or its memory against the caps."""
    runs = raw["steps_s"]
    figures = [figure(f"{case.title}, Lightning: our step", 1e3 * median_s(runs["ours"]), "ms")]
    if "ddp" in runs:
        saved = 100 * (1.0 - ratio(runs["ours"], runs["ddp"]))
        figures.append(figure(f"{case.title}, Lightning: less time than stock DDP", saved, "%"))
    if "balanced" in runs:
        saved = 100 * (1.0 - ratio(runs["ours"], runs["balanced"]))
        figures.append(figure(f"{case.title}, Lightning: less time than the balanced engine", saved, "%"))
    if "balanced" in runs and "replicas" in runs:
        value = ratio(runs["replicas"], runs["balanced"])
        name = f"{case.title}, Lightning: plain data parallelism, ours / balanced engine"
        figures.append(figure(name, value, "x", most=REPLICAS))
    for engine, words in WORDS.items():
        if engine in runs:
            p95_s, longest_s = tail_s(runs[engine])
            figures.append(figure(f"{case.title}, Lightning: {words}, p95 step", 1e3 * p95_s, "ms"))
            figures.append(figure(f"{case.title}, Lightning: {words}, longest step", 1e3 * longest_s, "ms"))
    taken = max(value for each in raw["taken"].values() for value in each)
    name = f"{case.title}, Lightning: emulated work, taken / asked, greatest of all engines and ranks"
    figures.append(figure(name, taken, "x", most=TAKEN))
    if raw["mem_bytes"] is not None:
        held = max(h / m for h, m in zip(raw["held_bytes"]["ours"], raw["mem_bytes"], strict=True))
        whole = raw["model_bytes"] / max(raw["mem_bytes"])
        name = f"{case.title}, Lightning: parameters, gradients, optimizer state"
        figures.append(figure(f"{name}, most held / device's memory", held, "", most=1.0))
        figures.append(figure(f"{name}, whole model / largest memory", whole, "", least=1.0))
    return figures


def overhead_figures(raw: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Holds our walker against `torch.distributed.pipelining`."""
    figures: list[Figure] = []
    for name, one in raw.items():
        against = f"{name}: ours / torch.distributed.pipelining"
        most = OVERHEAD_EMULATED if name.startswith("emulated") else OVERHEAD
        figures.append(figure(against, ratio(one["steps_s"]["ours"], one["steps_s"]["torch"]), "x", most=most))
        spent = [[[run_s] for run_s in one["processor_s"][engine]] for engine in ("ours", "torch")]
        figures.append(figure(f"{against}, processor time", ratio(*spent), "x"))
    return figures


def overhead_table(raw: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what a step takes by our walker and by `torch.distributed.pipelining`."""
    rows = [
        [
            name,
            *(_ms(median_s(one["steps_s"][engine])) for engine in ("ours", "torch")),
            _ms(one["modelled_s"]),
            *(_ms(statistics.median(one["processor_s"][engine])) for engine in ("ours", "torch")),
        ]
        for name, one in raw.items()
    ]
    head = ["our walker [ms]", "torch.distributed.pipelining [ms]", "modelled [ms]"]
    spent = ["our walker, processor of all ranks [ms]", "torch's [ms]"]
    return markdown(["overhead", *head, *spent], rows)


def tables(raw: Mapping[str, Any]) -> str:
    """Returns all plans, measured and modelled, and all engines, for readers."""
    walked: list[list[Any]] = []
    for title, one in raw["walked"].items():
        for name, runs in one["steps_s"].items():
            modelled = one["modelled_s"].get(name)
            measured = median_s(runs)
            part = None if modelled is None else modelled / measured
            note = one["note"].get(name, "the even chain's borders and micro-batches, 1F1B, links free")
            walked.append([title, name, _ms(measured), *map(_ms, tail_s(runs)), _ms(modelled), part, note])
        walked += [[title, name, *[None] * 5, "fits no device's memory"] for name in one["does_not_fit"]]
        walked.append([title, "bound", None, None, None, _ms(one["bound_s"]), None, "no plan is faster"])
    trained = [
        [
            title,
            *(_ms(median_s(one["steps_s"][engine])) if engine in one["steps_s"] else None for engine in WORDS),
            _ms(one["modelled_s"]),
            " ".join(f"{held / 1e6:.2f}" for held in one["held_bytes"]["ours"]),
            f"{one['model_bytes'] / 1e6:.2f}",
        ]
        for title, one in raw["trained"].items()
    ]
    engines = [
        [title, words, *map(_ms, (median_s(runs), *tail_s(runs), one["exchange_s"][engine])), max(one["taken"][engine])]
        for title, one in raw["trained"].items()
        for engine, words in WORDS.items()
        if (runs := one["steps_s"].get(engine)) is not None
    ]
    return "\n\n".join(
        [
            markdown(
                ["scenario", "plan", "measured [ms]", "p95 [ms]", "longest [ms]", "modelled [ms]",
                 "modelled / measured", "made up of"],
                walked,
            ),
            markdown(
                ["Lightning", "stock DDP [ms]", "balanced [ms]", "ours, plain DP [ms]", "ours [ms]", "modelled [ms]",
                 "held by rank [MB]", "whole [MB]"],
                trained,
            ),
            markdown(
                ["Lightning", "engine", "median step [ms]", "p95 [ms]", "longest [ms]", "exchange not hidden [ms]",
                 "emulated work, taken / asked"],
                engines,
            ),
            *([overhead_table(raw["overhead"])] if raw["overhead"] else []),
        ]
    )  # fmt: skip


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1e3 * seconds:.1f}"
