"""A rank's way through an epoch, and what ranks tell each other when they meet (layer P).

    slot       one batch of Lightning's loop, on all ranks alike: a local step (or a part of one), or a rest
    round      slots up to the next average; ``accumulate`` slots make a local step
    epoch      as many slots as the rank with most batches has; it ends with an average

Because rests are slots, too, Lightning's counters agree on all ranks, and all that it derives from them: where it
validates, saves, moves schedulers, and stops.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = [
    "Client", "ClientRow", "Course", "RoundPlan", "chosen_ranks", "digest_of", "disagreement", "of_all", "spread",
]


class Client(NamedTuple):
    """What one rank trains on.

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
        epoch, slot: where it is.
        weight: what its parameters count in the average: samples, or what the user counts, since the last one.
        made: local steps since then.
        samples, steps, compute_s: of the steps since the last decision whose time is believed: sums.
        wait_s: of its own, when ranks met last.
        passes, taken: its place in its data, see `lightning_hetero.federated.runtime.own.Place`.
        digest: of what all ranks must have alike.
        states: digest of what its optimizers hold, which may differ.
        sigterm: whether it was told to stop.
        requeue: number of the signal by which SLURM has asked rank 0 for the job to be requeued; 0: it has not.
    """

    epoch: float
    slot: float
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
    places = {rank: (int(row.epoch), int(row.slot)) for rank, row in zip(ranks, rows, strict=True)}
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
    absent = ClientRow(*(0.0 for _ in ClientRow._fields))._replace(epoch=rows[0].epoch, slot=rows[0].slot)
    known = dict(zip(present, rows, strict=True))
    return [known.get(rank, absent) for rank in range(world_size)]


def spread(values: Sequence[int], present: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Returns a number for each rank that there was at first: 0 for one that is not there."""
    known = dict(zip(present, values, strict=True))
    return tuple(known.get(rank, 0) for rank in range(world_size))


def chosen_ranks(world_size: int, part: float, generator: np.random.Generator) -> frozenset[int]:
    """Returns the ranks that take part in a round: ``part`` of all, rounded up, drawn without replacement.

    Args:
        world_size: number of ranks.
        part: in (0, 1]; 1: all, and nothing is drawn.
        generator: the same on all ranks.
    """
    if part >= 1.0:
        return frozenset(range(world_size))
    number = max(1, math.ceil(part * world_size - 1e-9))
    return frozenset(int(rank) for rank in generator.choice(world_size, size=number, replace=False))


class Course:
    """Which slots of an epoch this rank trains in, and where rounds end; the same rounds on all ranks.

    Args:
        rank: this rank's place among those that are there.
        clients: what all ranks train on.
        again: whether a rank whose data are through begins them again; else it rests until the epoch ends.
        accumulate: slots of a local step.
        slots: of an epoch; None: as many as the rank with most batches has.

    Attributes:
        rank: as given; another one when ranks are lost or come.
        slots: of an epoch.
        began: slot in which the round began.
    """

    def __init__(
        self, rank: int, clients: Sequence[Client], *, again: bool, accumulate: int = 1, slots: int | None = None
    ) -> None:
        self.slots = max(client.batches for client in clients) if slots is None else slots
        self.began = 0
        self.rank = rank
        self._accumulate = accumulate
        self._windows = math.inf if again else -(-clients[rank].batches // accumulate)

    def step_of(self, slot: int) -> int:
        """Returns the number of the local step within the round."""
        return (slot - self.began) // self._accumulate

    def trains(self, slot: int, plan: RoundPlan, chosen: Collection[int]) -> bool:
        """Tells whether this rank trains in ``slot``, or rests."""
        takes_part = self.rank in chosen and self.step_of(slot) < plan.steps[self.rank]
        return takes_part and slot // self._accumulate < self._windows

    def ends_round(self, slot: int, plan: RoundPlan, last: int) -> bool:
        """Tells whether the ranks meet behind ``slot``; ``last``: of the epoch."""
        return slot >= last or slot - self.began + 1 >= self._accumulate * max(plan.steps)

    def steps_after(self, slot: int, last: int) -> bool:
        """Tells whether Lightning counts an optimizer step for ``slot``."""
        return slot >= last or (slot + 1) % self._accumulate == 0
