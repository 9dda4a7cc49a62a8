"""From raw steps to figures; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.kit.figures import SETTLED, TAKEN, Figure, figure, named, paired
from benchmarks.sharded.cases import Case


def steady_s(case: Case, runs: list[list[float]]) -> float:
    """Returns the median over runs of the median step, where shares may have settled before and after a swap [s]."""
    bounds = [0, *([case.swap_at] if case.swap_at else []), case.steps]
    at = [i for begin, end in pairwise(bounds) for i in range(begin + SETTLED, end)]
    return statistics.median(statistics.median(run[i] for i in at) for run in runs)


def summarize(case: Case, raw: Mapping[str, Any]) -> list[Figure]:
    """Turns one case's raw steps into figures."""

    put = named(case.name)

    def ratio(engine: str, other: str) -> float:
        return paired(*([sum(run) for run in raw[name]["steps_s"]] for name in (engine, other)))

    stock_s, ours_s = (steady_s(case, raw[engine]["steps_s"]) for engine in ("stock", "ours"))
    first, last = case.ideal_s(0), case.ideal_s(case.steps - 1)
    ideal_s = statistics.fmean([first, last])
    even_s = case.work_s([case.per_rank] * len(case.caps()), 0)
    cost_s = max(0.0, stock_s - even_s)  # what a step of stock costs beyond emulated work: framework, gloo, the link
    figures = [
        put("ideal step", ideal_s * 1e3, "ms"),
        put("stock ModelParallelStrategy step", stock_s * 1e3, "ms"),
        put("our step", ours_s * 1e3, "ms"),
        put("stock's cost per step beyond emulated work", cost_s * 1e3, "ms"),
    ]
    if case.equal:
        figures += [
            put("ours / stock, whole run", ratio("ours", "stock"), "x", most=1.02),
            put("ours / stock, steady step", ours_s / stock_s, "x"),
            put("stock / stock (noise), whole run", ratio("stock again", "stock"), "x"),
        ]
    else:
        figures += [
            put("speed-up over stock", stock_s / ours_s, "x"),
            put("speed-up over stock, whole run", 1 / ratio("ours", "stock"), "x"),
            put("fraction of ideal, gross", ideal_s / ours_s, ""),
            put("fraction of ideal, net", ideal_s / max(1e-9, ours_s - cost_s), "", least=0.95),
            put("best static parts, weighted by hand: step", steady_s(case, raw["static"]["steps_s"]) * 1e3, "ms"),
            put("ours / best static parts in hindsight, whole run", ratio("ours", "static"), "x"),
            put("ours / best static parts in hindsight, whole run, with the last run's speeds",
                ratio("ours again", "static"), "x", most=0.9 if case.swap_at else 1.0),
            put("ours / best static parts in hindsight, steady step", ours_s / steady_s(case, raw["static"]["steps_s"]),
                "x", most=1.0),
        ]  # fmt: skip
    if "pipeline" in raw:
        pipeline_s = steady_s(case, raw["pipeline"]["steps_s"])
        figures.append(put("pipeline engine step", pipeline_s * 1e3, "ms"))
        figures.append(put("ours / pipeline engine, steady step", ours_s / pipeline_s, "x"))
    figures.append(put("relative gradient error, first step", max(raw["ours"]["gradient_error"]), "", most=1e-12))
    taken = max((value for engine in raw.values() for value in engine["taken"]), default=1.0)
    most = None if min(case.caps()) < case.global_batch else TAKEN  # a step in pieces takes longer than emulated
    figures.append(put("emulated work, taken / asked, greatest of all engines and ranks", taken, "x", most=most))
    return figures


def memory_figures(raw: Mapping[str, list[list[int]]]) -> list[Figure]:
    """What ranks hold at most above the interpreter and its libraries."""
    stock, ours = (statistics.median(max(run) for run in raw[engine]) for engine in ("stock", "ours"))
    return [
        figure("peak memory of a rank, 50 million parameters, stock", stock / 1e6, "MB"),
        figure("peak memory of a rank, ours / stock", ours / stock, "x", most=1.05),
    ]
