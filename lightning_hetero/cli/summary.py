"""Results as rows and plain-text tables (pure functions); their figures are the ledger's, see `record.ledger`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of one job, a line per rank: speed, share, and where the time of a step went.

    Args:
        ranks: `RankFigures`, as plain values.
    """
    header = ["rank", "samples/s", "samples", "share %", "work ms", "exchange ms", "waiting ms"]
    times = [[1e3 * r[name] for name in ("compute_s", "exchange_s", "wait_s")] for r in ranks]
    figures = [
        (r["samples_per_s"], r["samples_per_step"], 100 * r["share"], *own) for r, own in zip(ranks, times, strict=True)
    ]
    rows = [[str(r["rank"]), *(_number(v, 1) for v in row)] for r, row in zip(ranks, figures, strict=True)]
    return format_table(header, rows)


def comparison_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of several jobs, a line per result, in the order given.

    The speed-up is over the first result with a time. ``overrides`` appears if jobs differ in more than
    strategy and scenario, and holds what is not common to all. ``shares %`` is each rank's part of the
    global batch, rank 0 first; ``waiting %`` the part of all ranks' time in steps that is waiting.

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
        waiting = result.get("waiting")
        rows.append([
            str(result.get("job", index)), str(result.get("strategy") or "-"), str(result.get("scenario") or "-"),
            *([varied[index] or "-"] if told else []), _number(fit_s, 2),
            f"{first_s / fit_s:.2f}x" if first_s and fit_s else "-", _number(result.get("samples_per_s"), 1),
            *(_number(metric.get("value") if metric.get("name") == name else None, 4) for name in names),
            "/".join(f"{100 * rank['share']:.0f}" for rank in ranks) or "-",
            _number(None if waiting is None else 100 * waiting, 1),
        ])  # fmt: skip
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
