"""What the ranks did in a round, for loggers and reports (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.federated.decide.rounds import ClientRow
from lightning_hetero.types import SpeedSample, StepReport

__all__ = ["engine_metrics", "step_report"]


def step_report(rows: Sequence[ClientRow], sizes: Sequence[int], predicted_s: Sequence[float]) -> StepReport:
    """Returns samples, own work and waiting of each rank's local steps: means over the steps that were measured.

    Of a rank that made none, e.g. because it took no part, a time of 0 says nothing.

    Args:
        rows: of all ranks; of zeros, for those that were not there.
        sizes: of their batches, as planned.
        predicted_s: per rank, for a local step; empty where nobody predicts.
    """
    records = tuple(
        SpeedSample(
            rank=rank,
            step=int(row.slot),
            samples=round(row.samples / row.steps) if row.steps else sizes[rank],
            compute_s=row.compute_s / row.steps if row.steps else 0.0,
            wait_s=row.wait_s / max(1.0, row.made),
        )
        for rank, row in enumerate(rows)
    )
    predicted = tuple(predicted_s) or (math.nan,) * len(rows)
    return StepReport(epoch=int(rows[0].epoch), step=int(rows[0].slot), records=records, predicted_s=predicted)


def engine_metrics(rounds: int, rows: Sequence[ClientRow], clients: int) -> dict[str, float]:
    """Returns the engine's own numbers: of the round that was averaged last.

    Args:
        rounds: averages so far.
        rows: of all ranks, when they met last; of zeros, for those that were not there.
        clients: that are there.
    """
    total = math.fsum(row.weight for row in rows)
    metrics = {"rounds": float(rounds), "clients": float(clients)}
    for rank, row in enumerate(rows):
        metrics[f"local_steps/rank{rank}"] = row.made
        metrics[f"weight/rank{rank}"] = row.weight / total if total > 0 else 0.0
    return metrics
