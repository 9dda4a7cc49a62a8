"""The tables and pictures of docs/theory/stale_policies.md, from the results."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.pictures.sheet import Picture
from benchmarks.results import DASH, Results
from lightning_hetero.report.page.charts import Line, lines

__all__ = ["adam", "momentum", "picture_of", "table_of"]

NAMES = {
    "bsp (stock DDP)": "`bsp`: stock DDP",
    "flexible": "`flexible`, the default",
    "flexible late=complete": "`flexible`, `late=\"complete\"`",
    "quorum": "`quorum`, grace 0.1",
    "backup spares=1": "`backup`, 1 spare",
    "buffered k=2, bound=4": "`buffered`, 2 of 4",
    "ssp bound=8": "`ssp`, lead of 8",
    "asp": "`asp`",
    "dynsgd": "`dynsgd`",
    "dc_asgd": "`dc_asgd`",
}
CLUSTERS = {"equal": "calm", "1:1:1:1/8": "one straggler", "spells": "spells"}
LINES = {
    "bsp (stock DDP)": ("r6", False), "flexible": ("r0", False), "flexible late=complete": ("r5", True),
    "quorum": ("r2", False), "backup spares=1": ("r4", False), "buffered k=2, bound=4": ("r3", False),
    "ssp bound=8": ("r7", True), "asp": ("r1", False), "dynsgd": ("r7", False), "dc_asgd": ("r3", True),
}  # fmt: skip
SHOWN = 1.35  # of the time that flexible takes for the whole schedule


def _rows(results: Results, model: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["policy"]): row for row in results.raw["rows"] if row["model"] == model}


def table_of(results: Results) -> str:
    """Returns a table per optimizer: time to the target and final loss, over DDP's, cluster by cluster."""
    parts: list[str] = []
    for model in dict.fromkeys(row["model"] for row in results.raw["rows"]):
        rows = _rows(results, model)
        cases = list(dict.fromkeys(case for case, _ in rows))
        head = [model, *(f"{CLUSTERS[case]}: {what}" for case in cases for what in ("time", "final loss"))]
        lined = [head, ["---"] * len(head)]
        for policy in dict.fromkeys(policy for _, policy in rows):
            cells = [NAMES[policy]]
            for case in cases:
                row = rows[case, policy]
                time = row["target_to_ddp"]
                cells.append(DASH if time is None else f"{time:.2f}")
                cells.append(f"{row['loss_to_ddp']:.2f}" + (f" +- {row['error']:.2f}" if row["error"] else ""))
            lined.append(cells)
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lined))
    return "\n\n".join(parts)


def picture_of(results: Results, model: str) -> Picture:
    """Draws the curves of one model, a panel per cluster, as long as the default takes and a third."""
    rows = _rows(results, model)
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
        panels.append((f"{CLUSTERS[case]} ({case})", drawn))
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
    return picture_of(results, "MLP, momentum")


def adam(results: Results) -> Picture:
    """Adam."""
    return picture_of(results, "MLP, Adam")
