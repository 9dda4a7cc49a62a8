"""Iterable datasets: the loader's samples are re-batched in the main process, with no read-ahead to wait out (layer T).

``infinite``: every rank has its own endless stream and takes as many samples as its share.
``shared``: every rank reads the same stream; of each global batch a rank keeps its part and skips the rest.

Finite streams of their own per rank are refused by the caller: equal streams would run dry on the fast ranks first,
so balancing gains nothing (measured: 2.83 times the ideal time against 2.75 for stock DDP).
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_hetero.data.batches import Part, Split

__all__ = ["StreamMode", "rebatched_stream"]

StreamMode = Literal["infinite", "shared"]


def rebatched_stream(
    loader: DataLoader,
    *,
    mode: StreamMode,
    rank: int,
    world_size: int,
    global_batch_size: int,
    split: Split,
    position: Callable[[], tuple[int, int]],
    on_fetch: Callable[[Part], None],
    clock: Callable[[], float] = time.perf_counter,
) -> DataLoader:
    """Returns a copy of an iterable-style ``loader`` whose batches have this rank's share of samples.

    Args:
        loader: yields samples in chunks of its own ``batch_size``; its collate function is applied after re-batching.
        mode: see the module docstring.
        rank: this rank.
        world_size: number of ranks.
        global_batch_size: samples of all ranks together.
        split: decides the shares of a batch when it is drawn.
        position: epoch, and batches of it already trained on, which a shared stream skips.
        on_fetch: gets each part when its batch is handed out.
        clock: seconds.
    """
    balanced = copy.copy(loader)
    balanced.__class__ = _stream_class(type(loader))
    source = copy.copy(loader)
    chunks = copy.copy(loader.batch_sampler)
    object.__setattr__(chunks, "drop_last", False)  # our own drop_last is about the global batch
    slots: dict[str, Any] = {"collate_fn": _keep, "drop_last": False, "_iterator": None, "batch_sampler": chunks}
    if mode == "shared":
        slots["in_order"] = True  # the ranks must see the samples in the same order
    for name, value in slots.items():
        object.__setattr__(source, name, value)
    stream = _Stream(
        source=source,
        collate=loader.collate_fn,
        mode=mode,
        rank=rank,
        world_size=world_size,
        total=global_batch_size,
        drop_last=loader.drop_last,
        split=split,
        position=position,
        on_fetch=on_fetch,
        clock=clock,
    )
    object.__setattr__(balanced, "_hetero", stream)
    return balanced


def _keep(samples: list[Any]) -> list[Any]:
    return samples


@cache
def _stream_class(cls: type[DataLoader]) -> type[DataLoader]:
    def iterate(self: Any) -> Iterator[Any]:
        return self._hetero.batches()

    def length(self: Any) -> int:
        return self._hetero.num_batches()

    def get_iterator(self: Any) -> Any:
        return self._hetero.source._iterator

    def set_iterator(self: Any, value: Any) -> None:
        self._hetero.source._iterator = value

    # Lightning ends persistent workers through this attribute of the loader it knows; they belong to the source.
    iterator = property(get_iterator, set_iterator)
    members = {"__module__": cls.__module__, "__iter__": iterate, "__len__": length, "_iterator": iterator}
    return type(f"Balanced{cls.__name__}", (cls,), members)


@dataclass(kw_only=True, slots=True)
class _Stream:
    """State of one re-batched stream; a fresh pass over the source for every epoch."""

    source: DataLoader
    collate: Callable[[list[Any]], Any]
    mode: StreamMode
    rank: int
    world_size: int
    total: int
    drop_last: bool
    split: Split
    position: Callable[[], tuple[int, int]]
    on_fetch: Callable[[Part], None]
    clock: Callable[[], float]
    epoch: int = 0

    def num_batches(self) -> int:
        """Length of a sized stream in global batches; ``TypeError`` without one, as `DataLoader` does.

        Of an infinite stream the dataset's length is one rank's epoch, as under stock DDP; it is not where it ends.
        """
        samples = len(self.source.dataset)  # type: ignore[arg-type]
        if self.mode == "infinite":
            samples *= self.world_size
        return samples // self.total if self.drop_last else -(-samples // self.total)

    def batches(self) -> Iterator[Any]:
        samples = _Buffer(self.source)
        self.epoch, first = self.position()
        if self.mode == "shared":
            samples.skip(first * self.total)
        for step in count(first):
            started_s = self.clock()
            part = self._shared(step, samples) if self.mode == "shared" else self._own(step, samples)
            if part is None:
                return
            shares, mine, taken, decided_s = part
            batch = self.collate(mine)
            self.on_fetch(
                Part(
                    epoch=self.epoch,
                    step=step,
                    samples=shares[self.rank],
                    shares=shares,
                    weight_base=float(taken),
                    fetch_s=max(0.0, self.clock() - started_s - decided_s),
                )
            )
            yield batch

    def _decide(self, step: int, total: int) -> tuple[tuple[int, ...], float]:
        before = self.clock()
        shares = self.split(self.epoch, step, total)
        return shares, self.clock() - before

    def _shared(self, step: int, samples: _Buffer) -> tuple[tuple[int, ...], list[Any], int, float] | None:
        block = samples.take(self.total)
        if not block or (self.drop_last and len(block) < self.total):
            return None
        shares, decided_s = self._decide(step, len(block))
        offset = sum(shares[: self.rank])
        mine = block[offset : offset + shares[self.rank]] or block[:1]
        return shares, mine, len(block), decided_s

    def _own(self, step: int, samples: _Buffer) -> tuple[tuple[int, ...], list[Any], int, float]:
        shares, decided_s = self._decide(step, self.total)
        wanted = max(1, shares[self.rank])
        mine = samples.take(wanted)
        if len(mine) < wanted:
            raise RuntimeError(
                f"the stream of rank {self.rank} was declared infinite (stream='infinite') but ended at batch {step};"
                " repeat the data, give all ranks the same stream and stream='shared', or use strategy='ddp'"
            )
        return shares, mine, self.total, decided_s


class _Buffer:
    """Single samples out of a loader that yields lists of them."""

    def __init__(self, source: DataLoader) -> None:
        self._chunks = iter(source)
        self._left: deque[Any] = deque()

    def take(self, n: int) -> list[Any]:
        """Returns up to ``n`` samples; fewer only at the end of the stream."""
        while len(self._left) < n:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._left.extend(chunk)
        return [self._left.popleft() for _ in range(min(n, len(self._left)))]

    def skip(self, n: int) -> None:
        """Leaves out ``n`` samples, as far as there are."""
        while n > 0 and (dropped := len(self.take(min(n, 1024)))):
            n -= dropped
