"""The order of an epoch: which samples make global batch t, agreed by all ranks, independent of any share (layer T).

| the user's loader has                                   | global batch t is                                        |
|---------------------------------------------------------|----------------------------------------------------------|
| no sampler of its own (``shuffle`` on or off)           | what stock DDP trains on: ``DistributedSampler``'s order |
| its own ``Sampler``                                     | the next B of rank 0's sequence, sent to all             |
| ``DistributedSampler``                                  | what the ranks' samplers draw together                   |
| any sampler, ``use_distributed_sampler=False``          | the ranks' own t-th batches, pooled                      |
| its own batch sampler, on request                       | ``world_size`` batches in a row, pooled                  |
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

__all__ = [
    "Channel",
    "EpochOrder",
    "FixedSizeOrder",
    "PooledBatches",
    "PooledRanks",
    "SamplerOrder",
    "ShuffledOrder",
]


class Channel(Protocol):
    """The few blocking exchanges that orders need, at set-up and at the start of an epoch."""

    rank: int
    world_size: int

    def all_gather_object(self, value: object) -> list: ...

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]: ...


class EpochOrder(ABC):
    """The global batches of each epoch.

    Attributes:
        global_batch_size: samples of a full global batch.
    """

    global_batch_size: int

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of global batches of an epoch."""

    @abstractmethod
    def batches(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        """Returns ``(indices, ends)``: global batch t is ``indices[ends[t-1]:ends[t]]``. May communicate."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to draw this epoch's order again."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""


class FixedSizeOrder(EpochOrder):
    """Global batches of a fixed size over one sequence of indices; the last may be partial.

    Args:
        samples: length of the sequence.
        global_batch_size: samples per global batch.
        drop_last: leave out a partial last batch.
    """

    def __init__(self, samples: int, *, global_batch_size: int, drop_last: bool) -> None:
        self.samples = samples
        self.global_batch_size = global_batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        full, rest = divmod(self.samples, self.global_batch_size)
        return full if self.drop_last or rest == 0 else full + 1

    def batches(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        indices = self.indices(epoch)
        size = self.global_batch_size
        return indices, [min((t + 1) * size, len(indices)) for t in range(len(self))]

    @abstractmethod
    def indices(self, epoch: int) -> Sequence[Any]:
        """Returns the epoch's whole sequence."""


class ShuffledOrder(FixedSizeOrder):
    """The order of torch's ``DistributedSampler`` before it deals the samples out to ranks, and without its padding.

    Args:
        samples: size of the dataset.
        seed: with the epoch, seeds the permutation, as `DistributedSampler` does.
        shuffle: whether to permute at all.
        global_batch_size, drop_last: see `FixedSizeOrder`.
    """

    def __init__(self, samples: int, *, seed: int, shuffle: bool, global_batch_size: int, drop_last: bool) -> None:
        super().__init__(samples, global_batch_size=global_batch_size, drop_last=drop_last)
        self.seed = seed
        self.shuffle = shuffle

    def indices(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(self.samples)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()


class SamplerOrder(FixedSizeOrder):
    """A user's own sampler: rank 0 draws it once per epoch, everybody gets the same sequence.

    A sampler without a generator of its own draws from the global one, so the draw is done under a seed made of
    ``seed + epoch``: reproducible on resume, and the ranks' own random streams stay untouched. A sampler with its own
    ``generator`` keeps it; its state at the start of the epoch goes into the checkpoint.

    Args:
        sampler: sized iterable of indices.
        seed: see above.
        channel: sends rank 0's draw to the others.
        global_batch_size, drop_last: see `FixedSizeOrder`.
    """

    def __init__(
        self, sampler: Iterable[Any], *, seed: int, channel: Channel, global_batch_size: int, drop_last: bool
    ) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(
                f"sampler {type(sampler).__name__} has no length; give it a __len__ so that the epoch can be divided"
            )
        super().__init__(len(sampler), global_batch_size=global_batch_size, drop_last=drop_last)
        self.sampler = sampler
        self.seed = seed
        self.channel = channel
        self._state: dict[str, Any] = {}

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def indices(self, epoch: int) -> Sequence[Any]:
        generator = self._generator
        if generator is not None:
            if self._state.get("epoch") == epoch:
                generator.set_state(self._state["generator"])
            self._state = {"epoch": epoch, "generator": generator.get_state()}
        drawn = draw(self.sampler, self.seed + epoch) if self.channel.rank == 0 else None
        if drawn is not None and len(drawn) != self.samples:
            raise ValueError(
                f"sampler {type(self.sampler).__name__} announced {self.samples} samples but gave {len(drawn)};"
                " its __len__ must be the number of indices it yields"
            )
        return self.channel.broadcast_indices(drawn)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


class PooledRanks(EpochOrder):
    """Every rank's own sampler, as stock DDP would use it: global batch t is the ranks' t-th batches together.

    For ``use_distributed_sampler=False`` and for subclasses of `DistributedSampler`: the user divides the data, we
    only move samples between the ranks of one global batch. The datasets must be the same on all ranks.

    Args:
        source: the rank's sampler (of indices) or batch sampler (of lists of indices).
        batch_size: per-rank batch size, or ``None`` if ``source`` yields batches.
        drop_last: leave out a rank's partial last batch.
        seed: see `SamplerOrder`.
        channel: collects the sequences.
    """

    def __init__(
        self, source: Iterable[Any], *, batch_size: int | None, drop_last: bool, seed: int, channel: Channel
    ) -> None:
        if not isinstance(source, Sized):
            raise TypeError(f"sampler {type(source).__name__} has no length; give it a __len__")
        self.source = source
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.channel = channel
        n = len(source)
        if batch_size is not None:
            n = n // batch_size if drop_last else -(-n // batch_size)
        sizes = [batch_size or getattr(source, "batch_size", None) or 1] * channel.world_size
        self._num_batches = max(channel.all_gather_object(n))
        self.global_batch_size = sum(sizes)

    def __len__(self) -> int:
        return self._num_batches

    def batches(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        # Not reseeded: the ranks' samplers may rely on differing random streams.
        mine = list(self.source)
        if self.batch_size is not None:
            mine = chunks(mine, self.batch_size, self.drop_last)
        return concatenate(
            [batch for rank in everyone for batch in rank[t : t + 1]]
            for everyone in [self.channel.all_gather_object(mine)]
            for t in range(self._num_batches)
        )


class PooledBatches(EpochOrder):
    """A user's batch sampler: global batch t is ``world_size`` of its batches in a row, re-divided among the ranks.

    Its batches are drawn on rank 0. What it promises about a *single* batch (equal lengths, class balance) holds for
    the pool, not for a rank's part of it, which is why this is used only when asked for.
    """

    def __init__(self, batch_sampler: Iterable[Any], *, seed: int, channel: Channel) -> None:
        if not isinstance(batch_sampler, Sized):
            raise TypeError(f"batch sampler {type(batch_sampler).__name__} has no length; give it a __len__")
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.channel = channel
        self._num_batches = -(-len(batch_sampler) // channel.world_size)
        size = getattr(batch_sampler, "batch_size", None)
        if not isinstance(size, int):
            size = max((len(b) for b in draw(batch_sampler, seed)), default=1)
        self.global_batch_size = size * channel.world_size

    def __len__(self) -> int:
        return self._num_batches

    def batches(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        world = self.channel.world_size
        flat: list[int] = []
        ends: list[int] = []
        if self.channel.rank == 0:
            pools = chunks(draw(self.batch_sampler, self.seed + epoch), world, drop_last=False)
            flat, ends = concatenate(pools)  # type: ignore[assignment]
        drawn = [self.channel.broadcast_indices(x if self.channel.rank == 0 else None) for x in (flat, ends)]
        return drawn[0], drawn[1]


def chunks(items: Sequence[Any], size: int, drop_last: bool) -> list[Sequence[Any]]:
    """Returns ``items`` cut into lists of ``size``, the last one shorter unless ``drop_last``."""
    cut = [items[i : i + size] for i in range(0, len(items), size)]
    return cut[:-1] if drop_last and cut and len(cut[-1]) < size else cut


def concatenate(pools: Iterable[Iterable[Sequence[Any]]]) -> tuple[list[Any], list[int]]:
    """Returns the flat sequence of all pools' batches and the end of each pool."""
    flat: list[Any] = []
    ends: list[int] = []
    for pool in pools:
        for batch in pool:
            flat.extend(batch)
        ends.append(len(flat))
    return flat, ends


def draw(sampler: Iterable[Any], seed: int) -> list[Any]:
    """Returns ``list(sampler)`` drawn under ``seed``; the global random streams are left as they were."""
    with _seeded(seed):
        return list(sampler)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state, np_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(np_state)
