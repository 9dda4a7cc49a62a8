"""A rank's way through an epoch, and what ranks tell each other when they meet (layer P).

    batch      one of Lightning's loop, on all ranks: a local step (or a part of one), or nothing
    round      batches up to the next average; ``accumulate`` of them make a local step
    epoch      as many batches as the rank with most of them has; it ends with an average
    stream     each rank reads a round ahead; how many batches it has left travels when ranks meet, so that all know
               the epoch's last batch before the round in which it is

Because a rest is a batch, too, Lightning's counters agree on all ranks, and all that it derives from them: where it
validates, saves, moves schedulers, and stops.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_hetero.types import SpeedSample, StepReport

UNCOUNTED = sys.maxsize
"""Samples and batches of a finite stream, which nobody knows before its end."""


class Client(NamedTuple):
    """What one rank trains on; of a finite stream ``samples`` and ``batches`` are `UNCOUNTED`.

    Attributes:
        samples: of one pass over its data.
        batch_size: of its train loader, at most ``samples``; the largest, where a batch sampler decides.
        batches: of one pass.
    """

    samples: int
    batch_size: int
    batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlan:
    """What the ranks do until they meet again, by rank.

    Attributes:
        sizes: samples of a local step's batch.
        steps: local steps.
        lr_factors: factor of the learning rate in local steps.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    lr_factors: tuple[float, ...]


class ClientRow(NamedTuple):
    """One rank's numbers as they travel when ranks meet: float64, in this order.

    Attributes:
        epoch, batch: where it is.
        weight: what its parameters count in the average: samples, or what the user counts, since the last one.
        made: local steps since then.
        samples, steps, compute_s: of the steps since the last decision whose time is believed: sums.
        wait_s: how long it waited when ranks met last.
        passes, taken: its place in the data, see `lightning_hetero.federated.runtime.own.DataPlace`.
        digest: of what must be equal on all ranks.
        states: digest of what its optimizers hold, which may differ.
        left: batches of its finite stream that come, of which one more than in a round counts as many.
        sigterm: whether it was asked to stop.
        requeue: number of the signal by which SLURM has asked rank 0 for the job to be requeued; 0: it has not.
    """

    epoch: float
    batch: float
    weight: float
    made: float
    samples: float
    steps: float
    compute_s: float
    wait_s: float
    passes: float
    taken: float
    digest: float
    states: float
    left: float
    sigterm: float
    requeue: float


def digest_of(*values: object) -> float:
    """Returns 32 bits of what the values look like, exact in a float64."""
    return float(zlib.crc32(repr(values).encode()))


def disagreement(rows: Sequence[ClientRow], ranks: Sequence[int] | None = None) -> str | None:
    """Returns what to tell of ranks that are at different places or hold different things; None: they agree.

    Args:
        rows: of the ranks that are there.
        ranks: which these are; None: all.
    """
    ranks = range(len(rows)) if ranks is None else ranks
    places = {rank: (int(row.epoch), int(row.batch)) for rank, row in zip(ranks, rows, strict=True)}
    if len(set(places.values())) > 1:
        return (
            f"the ranks are not at the same (epoch, batch): {places}. They do not run the same program, or a hook has"
            " left out batches on some of them only"
        )
    if len({row.digest for row in rows}) > 1:
        return (
            f"the ranks disagree at (epoch, batch) {places[ranks[0]]}: on the plan of the round, on which parameters"
            " there are, or on the names that were logged. Start all with the same program, arguments and versions, and"
            " log the same names on all ranks"
        )
    return None


def of_all(rows: Sequence[ClientRow], present: Sequence[int], world_size: int) -> list[ClientRow]:
    """Returns a row for each rank that there was at first: of zeros for one that is not there.

    Args:
        rows: of those that are.
        present: their ranks.
        world_size: ranks at first.
    """
    absent = ClientRow._make([0.0] * len(ClientRow._fields))._replace(epoch=rows[0].epoch, batch=rows[0].batch)
    known = dict(zip(present, rows, strict=True))
    return [known.get(rank, absent) for rank in range(world_size)]


def spread(values: Sequence[int], present: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Returns a number for each rank that there was at first: 0 for one that is not there."""
    known = dict(zip(present, values, strict=True))
    return tuple(known.get(rank, 0) for rank in range(world_size))


def cut_stream(samples: int, size: int, *, least: int, drop_last: bool) -> tuple[int, int]:
    """Returns the number of batches that a rank makes of the last samples of its stream, and the size of the first.

    Args:
        samples: that are left.
        size: of a batch.
        least: of any batch, at most ``size``; so the batch before the last may be smaller, or the last one larger.
        drop_last: leave out a last batch that is not whole.
    """
    if drop_last:
        return samples // size, size
    batches = min(-(-samples // size), max(1, samples // least))
    return batches, samples if batches == 1 else min(size, samples - (batches - 1) * least)


class Course:
    """Which batches of an epoch the ranks train in, and where rounds end; the same rounds on all ranks.

    Args:
        rank: this rank's place among those that are there.
        ends: by rank, the batch before which its data are through and it rests until the epoch ends; inf: it does not.
        batches: of the epoch, or of what Lightning trains of it.
        accumulate: batches of a local step.

    Attributes:
        rank, ends: as given; others when ranks are lost or come.
        last: number of the last batch.
        batch: number of the batch that runs.
        began: batch in which the round began.
    """

    def __init__(self, rank: int, ends: Sequence[float], batches: int, *, accumulate: int = 1) -> None:
        self.rank, self.ends, self.last = rank, ends, batches - 1
        self.batch = self.began = 0
        self._accumulate, self._most = accumulate, batches

    @property
    def step(self) -> int:
        """Number of the local step within the round."""
        return (self.batch - self.began) // self._accumulate

    def trains(self, plan: RoundPlan, rank: int) -> bool:
        """Returns whether a rank trains in the batch."""
        return self.step < plan.steps[rank] and self.batch < self.ends[rank]

    def hear(self, plan: RoundPlan, first: int, left: Sequence[int]) -> None:
        """Takes how many batches of the ranks' streams are left from batch ``first`` on, see `ClientRow`."""
        ends = [self.began + self._accumulate * steps for steps in plan.steps]  # of the ranks' part in the round
        self.ends = [
            first + batches if batches <= max(0, end - first) else math.inf
            for end, batches in zip(ends, left, strict=True)
        ]
        self.last = int(min(self._most, max(self.ends))) - 1

    def ends_round(self, plan: RoundPlan) -> bool:
        """Returns whether the ranks meet after the batch: all have made their steps, or are through."""
        parts = (min(self._accumulate * n, end - self.began) for n, end in zip(plan.steps, self.ends, strict=True))
        return self.batch >= self.last or (self.ends_step and self.batch + 1 - self.began >= max(parts))

    @property
    def ends_step(self) -> bool:
        """Whether Lightning counts an optimizer step for the batch."""
        return self.batch >= self.last or (self.batch + 1) % self._accumulate == 0

    @property
    def cuts_step(self) -> bool:
        """Whether this rank makes its step now, since its stream ends with the batch; Lightning counts it later."""
        return self.batch + 1 == self.ends[self.rank] and not self.ends_step


# ---- for loggers and reports ----------------------------------------------------------------------------------


def step_report(rows: Sequence[ClientRow], sizes: Sequence[int], predicted_s: Sequence[float]) -> StepReport:
    """Returns samples, own work and waiting of each rank's local steps: means over the steps that were measured.

    A rank that made none, e.g. because it took no part, has a time of 0, which says nothing.

    Args:
        rows: of all ranks; of zeros, for those that were not there.
        sizes: of their batches, as planned.
        predicted_s: per rank, for a local step; empty where nothing is predicted.
    """
    records = tuple(
        SpeedSample(
            rank=rank, step=int(row.batch), samples=round(row.samples / row.steps) if row.steps else sizes[rank],
            compute_s=row.compute_s / row.steps if row.steps else 0.0, wait_s=row.wait_s / max(1.0, row.made),
        )
        for rank, row in enumerate(rows)
    )
    predicted = tuple(predicted_s) or (math.nan,) * len(rows)
    return StepReport(epoch=int(rows[0].epoch), step=int(rows[0].batch), records=records, predicted_s=predicted)


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
