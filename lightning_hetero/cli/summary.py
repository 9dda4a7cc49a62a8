"""A run and results as rows and plain-text tables (pure functions).

Steady state here means the last half of the steps: adaptation, caches and start-up are over. Times are medians over it,
so that one hiccup of the machine does not change the picture. Under a strategy whose ranks do not all take part in
every batch (`BoundedStalenessStrategy`) a step made without a rank is one of 0 samples, and tells nothing about its
times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lightning_hetero.record.run import RecordedRun

_STEADY = 0.5  # part of the steps, from the end, that is looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """One rank over the steady state of one job.

    Attributes:
        rank: global rank.
        steps: steps the figures are taken from, those made without this rank included.
        samples: mean samples per step.
        share: mean part of the global batch, in [0, 1].
        samples_per_s: median speed of own work; None if no step took measurable time.
        compute_s: median time of own work per step it took part in [s].
        wait_s: median time spent waiting for peers per step it took part in [s].
    """

    rank: int
    steps: int
    samples: float
    share: float
    samples_per_s: float | None
    compute_s: float
    wait_s: float


def summarise_ranks(run: RecordedRun) -> list[RankSummary]:
    """Returns one summary per rank, in order of rank; empty if no step was measured."""
    steps = run.steps[-max(1, math.ceil(_STEADY * len(run.steps))) :]
    total = math.fsum(step.samples for step in steps)
    summaries: list[RankSummary] = []
    for rank in range(run.ranks) if steps else ():
        own = [turn for step in steps if (turn := step.turns.get(rank)) is not None]
        samples = math.fsum(turn.samples for turn in own)
        # A step without samples says nothing about the speed: its time is all fixed cost.
        speeds = [turn.samples / turn.compute_s for turn in own if turn.compute_s > 0 and turn.samples > 0]
        summaries.append(
            RankSummary(
                rank=rank,
                steps=len(steps),
                samples=samples / len(steps),
                share=samples / total if total > 0 else 0.0,
                samples_per_s=median(speeds) if speeds else None,
                compute_s=median(turn.compute_s for turn in own) if own else 0.0,
                wait_s=median(turn.wait_s for turn in own) if own else 0.0,
            )
        )
    return summaries


def mean_global_batch(run: RecordedRun) -> float:
    """Returns the samples of all ranks per measured step; 0 without measured steps."""
    return fmean(step.samples for step in run.steps) if run.steps else 0.0


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of one job, a line per rank: speed, share, compute and wait.

    Args:
        ranks: `RankSummary`, as plain values.
    """
    header = ["rank", "samples/s", "samples", "share %", "compute ms", "wait ms"]
    figures = [
        (r["samples_per_s"], r["samples"], 100 * r["share"], 1e3 * r["compute_s"], 1e3 * r["wait_s"]) for r in ranks
    ]
    rows = [[str(r["rank"]), *(_number(v, 1) for v in row)] for r, row in zip(ranks, figures, strict=True)]
    return format_table(header, rows)


def comparison_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of several jobs, a line per result, in the order given.

    The speed-up is over the first result with a time. ``overrides`` appears if jobs differ in more than
    strategy and scenario, and holds what is not common to all. ``shares %`` is each rank's part of the
    global batch, rank 0 first; ``waiting %`` the part of the ranks' steady-state steps spent waiting.

    Args:
        results: what the jobs wrote into their ``result.json``.
    """
    names = list(dict.fromkeys(str(r["metric"]["name"]) for r in results if r.get("metric")))
    varied = _varied_overrides(results)
    told = ["overrides"] if any(varied) else []
    header = ["job", "strategy", "scenario", *told, "fit s", "speed-up", "samples/s", *names, "shares %", "waiting %"]
    first_s = next((r["fit_s"] for r in results if r.get("fit_s")), None)
    rows: list[list[str]] = []
    for index, result in enumerate(results):
        ranks: list[Mapping[str, Any]] = result.get("ranks") or []
        fit_s, metric = result.get("fit_s"), result.get("metric") or {}
        work_s, wait_s = (math.fsum(rank[name] for rank in ranks) for name in ("compute_s", "wait_s"))
        rows.append(
            [
                str(result.get("job", index)),
                str(result.get("strategy") or "-"),
                str(result.get("scenario") or "-"),
                *([varied[index] or "-"] if told else []),
                _number(fit_s, 2),
                f"{first_s / fit_s:.2f}x" if first_s and fit_s else "-",
                _number(result.get("samples_per_s"), 1),
                *(_number(metric.get("value") if metric.get("name") == name else None, 4) for name in names),
                "/".join(f"{100 * rank['share']:.0f}" for rank in ranks) or "-",
                _number(100 * wait_s / (work_s + wait_s) if work_s + wait_s > 0 else None, 1),
            ]
        )
    return format_table(header, rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned table: columns that hold text are left-aligned, numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(_is_numeric(cell) for cell in column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [header, ["-" * width for width in widths], *rows]
    ]
    return "\n".join(lines)


def _varied_overrides(results: Sequence[Mapping[str, Any]]) -> list[str]:
    given = [[str(o) for o in result.get("overrides") or []] for result in results]
    common = set(given[0]).intersection(*given) if given else set()
    shown = ("strategy=", "emulation=")
    return [" ".join(o for o in job if o not in common and not o.startswith(shown)) for job in given]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _is_numeric(cell: str) -> bool:
    try:
        return cell == "-" or math.isfinite(float(cell.rstrip("x")))
    except ValueError:
        return False
