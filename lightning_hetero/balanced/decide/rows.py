"""What each rank tells the others of its steps: one row of numbers, beside the gradients (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_hetero.types import SpeedSample


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What a rank tells besides the times of its steps; NaN: it has nothing to tell.

    Attributes:
        free_cpu: part of its processors' time that others left free since it told last, in [0, 1].
        free_mem: part of its host's memory that is free, in [0, 1].
        most_samples: the most samples it can hold, as far as it has learned.
    """

    free_cpu: float = math.nan
    free_mem: float = math.nan
    most_samples: float = math.nan


class Row(NamedTuple):
    """One rank's numbers, as they travel: float64, in this order, the same number from every rank.

    Attributes:
        epoch, step: the batch.
        samples, compute_s, wait_s: means of its steps since the row before, of those on its latest share.
        digest: of the shares it ran on.
        batches: since the row before.
        work: of ``samples`` samples, as the user's ``batch_cost`` counts it.
        free_cpu, free_mem, most_samples: see `RankState`.
    """

    epoch: float
    step: float
    samples: float
    compute_s: float
    wait_s: float
    digest: float
    batches: float
    work: float
    free_cpu: float
    free_mem: float
    most_samples: float

    def record(self, rank: int) -> SpeedSample:
        """Returns what a policy is told of this rank."""
        return SpeedSample(
            rank=rank,
            step=int(self.step),
            samples=int(self.samples),
            compute_s=self.compute_s,
            wait_s=self.wait_s,
            work=self.work,
            free_cpu=self.free_cpu,
            free_mem=self.free_mem,
            most_samples=None if math.isnan(self.most_samples) else int(self.most_samples),
        )


class Rows:
    """All ranks' rows of one exchange, by column: quick to look at, because every rank waits for it in every step.

    Attributes:
        epoch, step, samples, compute_s, digest, batches, work, free_cpu, free_mem: see `Row`; one per rank.
        most_samples: see `SpeedSample`; one per rank.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        columns = [tuple(column) for column in zip(*rows, strict=True)]
        self.epoch, self.step, self.samples, self.compute_s, _, self.digest, self.batches = columns[:7]
        self.work, self.free_cpu, self.free_mem, most_samples = columns[7:]
        self.most_samples = tuple(None if math.isnan(most) else int(most) for most in most_samples)
        self._rows = rows

    @cached_property
    def records(self) -> tuple[SpeedSample, ...]:
        """What a policy is told of all ranks; made when it is first asked for."""
        return tuple(Row(*numbers).record(rank) for rank, numbers in enumerate(self._rows))
