"""Curves of the stale engine's policies, side by side."""

from __future__ import annotations

import math

from benchmarks.comparators.table import CLUSTERS, rows_of
from benchmarks.pictures.sheet import Picture
from benchmarks.results import Results
from lightning_hetero.report.page.charts import Line, lines

__all__ = ["adam", "momentum"]

LINES = {
    "bsp (stock DDP)": ("r6", False), "flexible": ("r0", False), "aged": ("r5", True),
    "quorum": ("r2", False), "backup spares=1": ("r4", False), "buffered k=2, bound=4": ("r3", False),
    "ssp bound=8": ("r7", True), "asp": ("r1", False), "dynsgd": ("r7", False),
}  # fmt: skip
SHOWN = 1.35  # of the time that flexible takes for the whole schedule


def _picture_of(results: Results, model: str) -> Picture:
    """Draws the curves of one model, a panel per cluster, as long as the default takes and a third."""
    rows = rows_of(results, model)
    panels: list[tuple[str, str]] = []
    for case in dict.fromkeys(case for case, _ in rows):
        end_s = SHOWN * rows[case, "flexible"]["t_s"][-1]
        series: list[Line] = []
        for policy, (kind, dashed) in LINES.items():
            row = rows[case, policy]
            points = [(t, math.log10(y)) for t, y in zip(row["t_s"], row["losses"], strict=True) if t <= end_s]
            xs, ys = [t for t, _ in points], [y for _, y in points]
            series.append(Line(name=policy, kind=kind, dashed=dashed, x=xs, y=ys))
        drawn = lines(series, label=case, x_name="emulated time [s]", y_name="log10 of the loss", from_zero=False)
        panels.append((CLUSTERS[case] + (f" ({case})" if case != CLUSTERS[case] else ""), drawn))
    legend = [(kind, ("(dashed) " if dashed else "") + policy) for policy, (kind, dashed) in LINES.items()]
    seeds = len(rows[next(iter(rows))]["pairs"])
    return Picture(
        title=f"Training loss against time, {model}",
        legend=legend,
        panels=panels,
        source=f"Simulated time, real gradients, means over {seeds} seeds, a point per epoch. Cut at 1.35 times the"
        " default's whole schedule; lines that end there go on. benchmarks/comparators/results.json",
    )


def momentum(results: Results) -> Picture:
    """Momentum SGD."""
    return _picture_of(results, "MLP, momentum")


def adam(results: Results) -> Picture:
    """Adam."""
    return _picture_of(results, "MLP, Adam")
