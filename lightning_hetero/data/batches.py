"""Cuts each agreed global batch into one contiguous part per rank (layer T).

    global batch t:   [ rank 0 | rank 1      | rank 2 | r3 ]      shares may differ at every t
    with micro-batches (a batch that fits no device at once): the same, once per micro-batch

The content of a global batch never depends on the shares; a rank with no share computes on a dummy of weight 0, one
sample as a rule, because every rank must take part in the collectives of a step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from lightning_hetero.data.costs import SampleCosts
from lightning_hetero.data.order import EpochOrder

__all__ = ["GlobalBatchSampler", "HandedParts", "Part", "Split", "micro_batch_size"]

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
        weight_base: samples that count as one whole batch for the loss: the global batch, or with micro-batches
            the global batch divided by their number.
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


def micro_batch_size(global_batch_size: int, micro_batches: int, quantum: int = 1) -> int:
    """Returns the samples of a full micro-batch: an equal part of the global batch, rounded up to the quantum.

    Raises:
        ValueError: micro-batches of that size would be fewer than ``micro_batches``, which an accumulation over a
            fixed number of batches cannot follow.
    """
    if micro_batches == 1:
        return global_batch_size
    size = -(-global_batch_size // (max(1, micro_batches) * quantum)) * quantum
    if -(-global_batch_size // size) != micro_batches:
        raise ValueError(
            f"a global batch of {global_batch_size} samples in multiples of {quantum} makes"
            f" {-(-global_batch_size // size)} micro-batches of {size}, not micro_batches={micro_batches}"
        )
    return size


class GlobalBatchSampler(Sampler[list[Any]]):
    """A batch sampler over the agreed order; yields this rank's indices and notes the part it issued.

    Args:
        order: the epoch's global batches.
        split: decides the shares of a batch when it is drawn.
        rank: this rank.
        micro_batches: Lightning batches per global batch (gradient accumulation); 1 = the global batch itself.
        quantum: full micro-batches are multiples of this many samples.
        costs: moves the boundaries between parts to where they cost what their shares say; None: samples cost alike.
        least: samples of a dummy; no micro-batch has fewer, as far as they can be moved from the one before.
        clock: seconds; to keep the decision out of the fetch time.

    Raises:
        ValueError: the global batch cannot be cut into that many micro-batches (see `micro_batch_size`).
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        split: Split,
        rank: int,
        micro_batches: int = 1,
        quantum: int = 1,
        least: int = 1,
        costs: SampleCosts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.order = order
        self.rank = rank
        self.micro_batches = micro_batches
        self.micro_size = micro_batch_size(order.global_batch_size, micro_batches, quantum)
        self.epoch = 0
        self.decision_s = 0.0
        self._split = split
        self._least, self._quantum = least, quantum
        self.costs = costs
        self._clock = clock
        self._plan: tuple[int, Sequence[Any], list[tuple[int, int, float]]] | None = None
        self._next: tuple[int, deque[Part]] = (0, deque())
        # What Lightning and users look for on a batch sampler.
        self.batch_size = order.global_batch_size
        self.drop_last = order.drop_last
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch and agrees on its order; Lightning calls it on every rank before the epoch."""
        self.epoch = epoch
        self._pieces()

    def __len__(self) -> int:
        if self.micro_batches == 1:
            return len(self.order)
        samples = self.order.num_samples
        if samples is None or self.drop_last:
            return len(self.order) * self.micro_batches
        full, rest = divmod(samples, self.order.global_batch_size)
        return full * self.micro_batches + -(-rest // self.micro_size)

    def begin(self, position: int) -> deque[Part]:
        """Sets where the next iteration starts and returns the queue of parts it will issue.

        Args:
            position: batches of this epoch already trained on. A shorter loader that `CombinedLoader` cycles again
                starts at a multiple of its length, hence the modulo.
        """
        issued: deque[Part] = deque()
        self._next = (position, issued)
        return issued

    def __iter__(self) -> Iterator[list[Any]]:
        position, issued = self._next
        self._next = (0, deque())
        epoch, indices, pieces = self._pieces()
        first = position % max(1, len(pieces))
        for i, (start, end, base) in enumerate(pieces[first:]):
            before = self._clock()
            shares = self._split(epoch, position + i, end - start)
            if self.costs is not None:
                shares = self.costs.cut(indices[start:end], shares)
            self.decision_s += self._clock() - before
            offset = start + sum(shares[: self.rank])
            mine = shares[self.rank]
            # The first samples of an epoch are as good a dummy as any for an empty micro-batch at its end.
            near = indices[start:end] if start < end else indices
            drawn = list(indices[offset : offset + mine]) if mine else list(islice(cycle(near), self._least))
            issued.append(
                Part(
                    epoch=epoch,
                    step=position + i,
                    samples=mine,
                    shares=shares,
                    weight_base=base,
                    dummy=self._least,
                    work=math.nan if self.costs is None else math.fsum(self.costs.of(drawn)),
                )
            )
            yield drawn

    def _pieces(self) -> tuple[int, Sequence[Any], list[tuple[int, int, float]]]:
        """Returns epoch, indices and (start, end, weight_base) of each Lightning batch; drawn once per epoch."""
        if self._plan is None or self._plan[0] != self.epoch:
            indices, ends = self.order.batches(self.epoch)
            pieces: list[tuple[int, int, float]] = []
            start = 0
            for end in ends:
                base = (end - start) / self.micro_batches
                pieces += [(low, high, base) for low, high in self._cut(start, end)]
                start = end
            self._plan = (self.epoch, indices, pieces)
        return self._plan

    def _cut(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the bounds of the micro-batches of one global batch.

        Lightning steps every ``micro_batches`` batches and after the last one. Orders of a fixed size are short only
        there; pools may be of any size anywhere, so theirs always make the full number, with empty ones at the end.
        """
        if self.micro_batches == 1:
            return [(start, end)]
        size, number = self.micro_size, self.micro_batches
        if self.order.num_samples is not None:
            number = max(1, -(-(end - start) // size))
        else:
            size = max(size, -(-(end - start) // number))
        lows = [min(end, start + i * size) for i in range(number)]
        last = max((i for i, low in enumerate(lows) if low < end), default=0)
        lacking = -(-(self._least - (end - lows[last])) // self._quantum) * self._quantum
        if last and 0 < lacking <= size - self._least:
            lows[last] -= lacking
        return list(zip(lows, [*lows[1:], end], strict=True))
