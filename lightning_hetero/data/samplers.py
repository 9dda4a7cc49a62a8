"""A user's own samplers: told the epoch, asked for their size, drawn under a seed (layer T)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_hetero.measure.device import device_of, nothing_drawn, save_generator


def announce_epoch(source: object, epoch: int) -> None:
    """Calls ``set_epoch`` of a sampler and of the sampler inside a batch sampler.

    Lightning does so only for samplers it finds on the loader, where ours has replaced them.
    """
    for sampler in (source, getattr(source, "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def batch_size_of(batch_sampler: Iterable[Any], seed: int) -> int:
    """Returns the batch size a batch sampler tells, or else the largest of one draw, which nobody has drawn after."""
    size = getattr(batch_sampler, "batch_size", None)
    if isinstance(size, int):
        return size
    with undrawn(batch_sampler, seed):
        return max((len(batch) for batch in batch_sampler), default=1)


def first_drawn(loader: DataLoader) -> list[Any]:
    """Returns the first index, or the first batch of them, that a loader would draw, which nobody has drawn after."""
    source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    with undrawn(source), suppress(Exception):
        return list(next(iter(source)))[:1]
    return []


def yields_batches(sampler: Iterable[Any]) -> bool:
    """Whether a sampler yields lists of indices, as a batch sampler does; one draw tells, which nobody has drawn."""
    with undrawn(sampler):
        return isinstance(next(iter(sampler), None), list)


def splits_by_rank(sampler: object, world_size: int) -> bool:
    """Whether a (batch) sampler draws one rank's part of the data, as torch's `DistributedSampler` does."""
    return world_size > 1 and any(
        getattr(s, "num_replicas", None) == world_size and hasattr(s, "rank")
        for s in (sampler, getattr(sampler, "sampler", None))
    )


def draw(sampler: Iterable[Any], seed: int) -> list[Any]:
    """Returns ``list(sampler)`` drawn under ``seed``; the global random streams are unchanged."""
    with _seeded(seed):
        return list(sampler)


@contextmanager
def undrawn(sampler: object, seed: int = 0) -> Iterator[None]:
    """Inside, what is drawn leaves the global random streams, and generators the sampler holds, unchanged."""
    owners = (sampler, getattr(sampler, "sampler", None))
    held = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    undo = [put_back for value in held if (put_back := save_generator(value, value)) is not None]
    try:
        with _seeded(seed):
            yield
    finally:
        for step in undo:
            step()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with nothing_drawn(device_of("cpu")):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
