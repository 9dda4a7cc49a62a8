"""What each rank tells the others of its steps: one row of numbers, beside the gradients (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_hetero.types import SpeedSample

__all__ = ["RankState", "Row", "Rows", "disagreement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """What a rank tells besides the times of its steps; NaN: it has nothing to tell.

    Attributes:
        free_cpu: part of its processors' time that others left free since it told last, in [0, 1].
        free_mem: part of its host's memory that is free, in [0, 1].
        most_samples: the most samples it can hold, as far as it has learned.
        checksum: of its parameters.
    """

    free_cpu: float = math.nan
    free_mem: float = math.nan
    most_samples: float = math.nan
    checksum: float = math.nan


class Row(NamedTuple):
    """One rank's numbers, as they travel: float64, in this order, the same number from every rank.

    Attributes:
        epoch, step: the batch.
        samples, compute_s, wait_s: means of its steps since the row before, of those on its latest share.
        digest: of the shares it ran on.
        batches: since the row before.
        work: of ``samples`` samples, as the user's ``batch_cost`` counts it.
        free_cpu, free_mem, most_samples, checksum: see `RankState`.
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
    checksum: float

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
        epoch, step, samples, compute_s, digest, batches, work, free_cpu, free_mem, checksum: see `Row`; one per rank.
        most_samples: see `SpeedSample`; one per rank.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        columns = [tuple(column) for column in zip(*rows, strict=True)]
        self.epoch, self.step, self.samples, self.compute_s, _, self.digest, self.batches = columns[:7]
        self.work, self.free_cpu, self.free_mem, most_samples, self.checksum = columns[7:]
        self.most_samples = tuple(None if math.isnan(most) else int(most) for most in most_samples)
        self._rows = rows

    @cached_property
    def records(self) -> tuple[SpeedSample, ...]:
        """What a policy is told of all ranks; made when it is first asked for."""
        return tuple(Row(*numbers).record(rank) for rank, numbers in enumerate(self._rows))


def disagreement(epoch: int, step: int, checksums: Sequence[float]) -> str | None:
    """Returns what to tell of checksums that differ, by rank; None: they agree, or nothing was told (NaN).

    Ranks that differ from more than half of all are named; without such a majority, as with two ranks, all are.

    Args:
        epoch, step: of the batch they travelled with.
        checksums: by rank, exact.
    """
    if all(map(math.isnan, checksums)):
        return None
    holders: dict[float, list[int]] = {}
    for rank, checksum in enumerate(checksums):
        if not math.isnan(checksum):
            holders.setdefault(checksum, []).append(rank)
    if len(holders) < 2:
        return None
    groups = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks))
    if 2 * len(groups[0]) > sum(map(len, groups)):
        odd = sorted(rank for ranks in groups[1:] for rank in ranks)
        who = f"the parameters of {_named(odd)} are not those of the other ranks"
    else:
        who = f"the parameters of {' and of '.join(map(_named, groups))} differ, and none has a majority"
    return (
        f"{who}: found with the batch of epoch {epoch}, step {step}. Weights drift apart without an error where a rank"
        " changes them outside of DDP's gradients (a callback on rank 0 only, a branch that depends on the rank or on"
        " its part of the data), where parameters were thawed after DDP was set up, where devices of different kinds"
        " round differently, and where memory is faulty. LoadBalancedStrategy(check_parameters_every=None) looks no"
        " longer"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
