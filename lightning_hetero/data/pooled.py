"""Orders of an epoch that are made of several ranks' batches (layer T)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler

from lightning_hetero.data.order import Channel, EpochOrder, SizedSampler, concatenate, equal_parts
from lightning_hetero.data.samplers import batch_size_of, draw, undrawn


class PooledRanks(EpochOrder):
    """Every rank's own sampler, as stock DDP would use it: global batch t is the ranks' t-th batches together.

    For ``use_distributed_sampler=False`` and for subclasses of `DistributedSampler`: the user divides the data, we
    only move samples between the ranks of one global batch. The datasets must be the same on all ranks.

    Args:
        source: the rank's sampler (of indices) or batch sampler (of lists of indices).
        batch_size: per-rank batch size, or ``None`` if ``source`` yields batches.
        drop_last: leave out a rank's partial last batch; only with ``batch_size``.
        seed: for a look at the sizes of a batch sampler that does not tell them (see `batch_size_of`).
        channel: collects the sequences.
    """

    def __init__(
        self, source: SizedSampler, *, batch_size: int | None, drop_last: bool, seed: int, channel: Channel
    ) -> None:
        self._source = source
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.channel = channel
        size = batch_size if batch_size is not None else batch_size_of(source, seed)
        everyone = channel.all_gather_object((self._own_batches(), size))
        self._agreed = self._own_batches(), max(n for n, _ in everyone)
        self.global_batch_size = sum(size for _, size in everyone)

    @property
    def source(self) -> object:
        return self._source

    def _own_batches(self) -> int:
        n, size = len(self._source), self.batch_size
        if size is None:
            return n
        return n // size if self.drop_last else -(-n // size)

    def __len__(self) -> int:
        own, everyones = self._agreed
        now = self._own_batches()
        return everyones if now == own else now  # changed since, by code that runs on all ranks

    def _mine(self) -> list[Any]:
        # Not reseeded: the ranks' samplers may rely on differing random streams.
        mine = list(self._source)
        return mine if self.batch_size is None else list(BatchSampler(mine, self.batch_size, self.drop_last))

    def _drawn(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        own = self._own_batches()
        everyone = self.channel.all_gather_object(self._mine())
        self._agreed = own, max(map(len, everyone))
        return concatenate([batch for rank in everyone for batch in rank[t : t + 1]] for t in range(self._agreed[1]))

    def look(self, epoch: int, rank: int, world_size: int) -> list[list[Any]]:
        with undrawn(self._source, self.seed + epoch):
            return [list(batch) for batch in self._mine()]


class PooledBatches(EpochOrder):
    """A user's batch sampler: global batch t is ``world_size`` of its batches in a row, re-divided among the ranks.

    Its batches are drawn on rank 0. What it promises about a *single* batch (equal lengths, class balance) holds for
    the pool, not for a rank's part of it, which is why this is used only when asked for.
    """

    def __init__(self, batch_sampler: SizedSampler, *, seed: int, channel: Channel) -> None:
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.channel = channel
        # Rank 0's figures, like its draws: a sampler's randomness may differ between ranks.
        sizes = [len(batch_sampler), batch_size_of(batch_sampler, seed)] if channel.rank == 0 else None
        batches, size = channel.broadcast_indices(sizes)
        self._num_batches = -(-batches // channel.world_size)
        self.global_batch_size = size * channel.world_size

    @property
    def source(self) -> object:
        return self.batch_sampler

    def __len__(self) -> int:
        return self._num_batches

    def _drawn(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        world = self.channel.world_size
        flat: list[int] = []
        ends: list[int] = []
        if self.channel.rank == 0:
            pools = BatchSampler(draw(self.batch_sampler, self.seed + epoch), world, drop_last=False)
            flat, ends = concatenate(pools)  # type: ignore[assignment]
        drawn = [self.channel.broadcast_indices(x if self.channel.rank == 0 else None) for x in (flat, ends)]
        self._num_batches = len(drawn[1])
        return drawn[0], drawn[1]

    def look(self, epoch: int, rank: int, world_size: int) -> list[list[Any]]:
        with undrawn(self.batch_sampler, self.seed + epoch):
            pools: list[Any] = list(BatchSampler(self.batch_sampler, world_size, drop_last=False))
        return equal_parts(*concatenate(pools), rank, world_size)
