"""Cuts each agreed global batch into one contiguous part per rank (layer T).

    global batch t:   [ rank 0 | rank 1      | rank 2 | r3 ]      shares may differ at every t

The content of a global batch never depends on the shares; a rank with no share computes on a dummy of weight 0, one
sample as a rule, because every rank must take part in the collectives of a step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Any

from torch.utils.data import Sampler

from lightning_hetero.data.order import EpochOrder, equal_parts

Split = Callable[[int, int, int], tuple[int, ...]]
"""(epoch, step, total samples) -> samples per rank, summing to the total."""


@dataclass(kw_only=True, slots=True)
class Part:
    """This rank's part of one Lightning batch; complete when the loader hands it out.

    Attributes:
        epoch: epoch it belongs to.
        step: batch index inside the epoch.
        samples: samples of this rank; 0 means the batch is a dummy of weight 0.
        shares: samples of all ranks.
        weight_base: samples that count as one whole batch for the loss.
        fetch_s: seconds this rank spent getting the batch, without the time to decide the shares.
        dummy: samples of the dummy that stands for none.
        work: of what this rank computes on, in the user's items; NaN: not counted.
    """

    epoch: int
    step: int
    samples: int
    shares: tuple[int, ...]
    weight_base: float
    fetch_s: float = 0.0
    dummy: int = 1
    work: float = math.nan

    @property
    def computed(self) -> int:
        """Samples this rank computes on, whether they count or not."""
        return self.samples or self.dummy

    @property
    def weight(self) -> float:
        """Factor for a mean-reduced local loss, so that DDP's mean over ranks is the mean over samples."""
        return len(self.shares) * self.samples / self.weight_base


class HandedParts(deque[Part]):
    """The parts that a loader has handed out and nobody has taken yet, in order."""

    def take(self, step: int) -> Part | None:
        """Returns the part of batch ``step``; None if it was not handed out.

        Batches that were fetched but never trained on (a user's look at the loader, an epoch cut short) stay behind:
        the latest of this number counts, what came before it is void.
        """
        part: Part | None = None
        for _ in range(max((n for n, p in enumerate(self, 1) if p.step == step), default=0)):
            part = self.popleft()
        return part


class EpochSampler(Sampler[list[Any]]):
    """What Lightning finds as the batch sampler of a copied loader: knows the epoch, whose order `draw` agrees on.

    Args:
        order: the epoch's global batches.
    """

    def __init__(self, order: EpochOrder) -> None:
        self.order = order
        self.epoch = 0
        self._drawn: tuple[int, Sequence[Any], Sequence[int]] | None = None
        # What Lightning and users look for on a batch sampler.
        self.batch_size = order.global_batch_size
        self.drop_last = order.drop_last
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, whose order is drawn with its first batch; Lightning calls it before users' hooks."""
        self.epoch = epoch
        self.order.announce(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def draw(self) -> tuple[Sequence[Any], Sequence[int]]:
        """Returns indices and the ends of the global batches; agreed on once per epoch, by every rank."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, *self.order.batches(self.epoch))
        return self._drawn[1:]

    def look(self, rank: int, world_size: int) -> list[list[Any]]:
        """Returns what stock DDP would show to somebody who looks at the loader: equal parts. Nothing is agreed."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            return self.order.look(self.epoch, rank, world_size)
        return equal_parts(*self._drawn[1:], rank, world_size)

    def __iter__(self) -> Iterator[list[Any]]:
        _, indices, ends = self._drawn or (0, (), ())  # one rank that looks must not draw: that is a collective
        for start, end in pairwise((0, *ends)):
            yield list(indices[start:end])


class GlobalBatchSampler(EpochSampler):
    """A batch sampler over the agreed order; yields this rank's indices and notes the part it issued.

    Args:
        order: the epoch's global batches.
        split: decides the shares of a batch when it is drawn.
        rank: this rank.
        least: samples of a dummy.
    """

    def __init__(self, order: EpochOrder, *, split: Split, rank: int, least: int = 1) -> None:
        super().__init__(order)
        self.rank = rank
        self.decision_s = 0.0
        self._split = split
        self._least = least
        self._next: tuple[int, bool, deque[Part]] = (0, True, deque())
        self._look: list[list[Any]] | None = None

    def begin(self, position: int, *, restarts: bool = False) -> deque[Part]:
        """Sets where the next iteration starts and returns the queue of parts it will issue.

        Args:
            position: batches of this epoch already trained on. A shorter loader that `CombinedLoader` cycles again
                starts at a multiple of its length, hence the modulo.
            restarts: they are all of the epoch's, and Lightning trains its first one again: a run that ``max_steps``
                ended there goes on.
        """
        issued: deque[Part] = deque()
        self._next = (position, restarts, issued)
        return issued

    def begin_look(self, world_size: int) -> None:
        """The next iteration yields what `look` returns."""
        self._look = self.look(self.rank, world_size)

    def __iter__(self) -> Iterator[list[Any]]:
        if self._look is not None:
            looked_at, self._look = self._look, None
            yield from looked_at
            return
        position, restarts, issued = self._next
        self._next = (0, True, deque())
        (indices, ends), epoch = self.draw(), self.epoch
        first = 0 if restarts else position % max(1, len(ends))
        for i, (start, end) in enumerate(list(pairwise((0, *ends)))[first:]):
            before = time.perf_counter()
            shares = self._split(epoch, position + i, end - start)
            self.decision_s += time.perf_counter() - before
            offset = start + sum(shares[: self.rank])
            mine = shares[self.rank]
            drawn = list(indices[offset : offset + mine])
            if not mine:
                drawn = list(islice(cycle(indices[start:end]), self._least))
            issued.append(
                Part(
                    epoch=epoch, step=position + i, samples=mine, shares=shares,
                    weight_base=float(end - start), dummy=self._least,
                )
            )
            yield drawn
