"""Samplers of users, and the batches they must give on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler, WeightedRandomSampler

from tests.ranks.data.indexed import cut


class Backwards(Sampler[int]):
    """A user's sampler which leaves some samples out; knows its epoch."""

    def __init__(self, n: int) -> None:
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n - 1 + self.epoch, -1 + self.epoch, -1))

    def __len__(self) -> int:
        return self.n


class Mirrored(DistributedSampler):
    """A subclass: what it draws is its own business."""

    def __iter__(self) -> Iterator[int]:
        return iter([29 - i for i in super().__iter__()])


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's: pairs (i, i + 1), every other one, in an order of the epoch's."""

    def __init__(self, first: int = 0, pairs: int = 7) -> None:
        self.first, self.pairs = first, pairs
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        turn = [(i + self.epoch) % self.pairs for i in range(self.pairs)]
        return iter([[self.first + 2 * i, self.first + 2 * i + 1] for i in turn])

    def __len__(self) -> int:
        return self.pairs


def weighted(seed: int | None = None) -> WeightedRandomSampler:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return WeightedRandomSampler([float(1 + i % 3) for i in range(30)], 26, generator=generator)


def replicas(cls: type[DistributedSampler], rank: int, n: int = 30, **kwargs: Any) -> DistributedSampler:
    return cls(range(n), num_replicas=2, rank=rank, seed=5, **kwargs)  # type: ignore[arg-type]


def per_epoch(sampler: Any, size: int, epochs: int = 3) -> list[list[int]]:
    batches: list[list[int]] = []
    for epoch in range(epochs):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        batches += cut(list(sampler), size)
    return batches


def of_ranks(*sources: Any, size: int | None = 4) -> list[list[int]]:
    """The ranks' own batches side by side: sorted sets, as we only promise which samples meet."""
    steps: list[list[int]] = []
    for epoch in range(3):
        own = []
        for source in sources:
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)
            own.append(list(source) if size is None else cut(list(source), size))
        steps += [sorted(i for b in step for i in b) for step in zip(*own, strict=True)]
    return steps
