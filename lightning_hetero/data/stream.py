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
from itertools import count, cycle, islice
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_hetero.data.batches import Part, Split
from lightning_hetero.data.copies import BatchFeed, altered_copy, fed_copy, keep_samples

StreamMode = Literal["infinite", "shared"]


def rebatched_stream(
    loader: DataLoader,
    *,
    mode: StreamMode,
    rank: int,
    world_size: int,
    global_batch_size: int,
    split: Split,
    least: int = 1,
    position: Callable[[], tuple[int, int]],
    on_fetch: Callable[[Part], None],
) -> DataLoader:
    """Returns a copy of an iterable-style ``loader`` whose batches have this rank's share of samples.

    Args:
        loader: yields samples in chunks of its own ``batch_size``; its collate function is applied after re-batching.
        mode: see the module docstring.
        rank: this rank.
        world_size: number of ranks.
        global_batch_size: samples of all ranks together.
        split: decides the shares of a batch when it is drawn.
        least: samples of a dummy, for a rank without a share.
        position: epoch, and batches of it already trained on, which a shared stream skips.
        on_fetch: gets each part when its batch is handed out.
    """
    chunks = copy.copy(loader.batch_sampler)
    object.__setattr__(chunks, "drop_last", False)  # our own drop_last is about the global batch
    # Of a shared stream the ranks must see the samples in the same order.
    attributes: dict[str, Any] = {"in_order": True} if mode == "shared" else {}
    source = altered_copy(loader, collate_fn=keep_samples, drop_last=False, batch_sampler=chunks, **attributes)
    stream = _Stream(
        source=source,
        collate=loader.collate_fn,
        mode=mode,
        rank=rank,
        world_size=world_size,
        total=global_batch_size,
        drop_last=loader.drop_last,
        split=split,
        least=least,
        position=position,
        on_fetch=on_fetch,
    )
    return fed_copy(loader, stream)


@dataclass(kw_only=True, slots=True)
class _Stream(BatchFeed):
    """State of one re-batched stream; a fresh pass over the source for every epoch."""

    source: DataLoader
    collate: Callable[[list[Any]], Any]
    mode: StreamMode
    rank: int
    world_size: int
    total: int
    drop_last: bool
    split: Split
    least: int
    position: Callable[[], tuple[int, int]]
    on_fetch: Callable[[Part], None]
    epoch: int = 0

    @property
    def fetching(self) -> DataLoader:
        return self.source

    def length(self, own: Callable[[], int]) -> int:
        """Length of a sized stream in global batches; ``TypeError`` without one, as `DataLoader` does.

        Of an infinite stream the dataset's length is one rank's epoch, as under stock DDP; it is not where it ends.
        """
        samples = len(self.source.dataset)  # type: ignore[arg-type]
        if self.mode == "infinite":
            samples *= self.world_size
        return samples // self.total if self.drop_last else -(-samples // self.total)

    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        samples = _Buffer(self.source)
        self.epoch, first = self.position()
        if self.mode == "shared":
            samples.skip(first * self.total)
        for step in count(first):
            started_s = time.perf_counter()
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
                    fetch_s=max(0.0, time.perf_counter() - started_s - decided_s),
                    dummy=self.least,
                )
            )
            yield batch

    def _decide(self, step: int, total: int) -> tuple[tuple[int, ...], float]:
        before = time.perf_counter()
        shares = self.split(self.epoch, step, total)
        return shares, time.perf_counter() - before

    def _shared(self, step: int, samples: _Buffer) -> tuple[tuple[int, ...], list[Any], int, float] | None:
        block = samples.take(self.total)
        if not block or (self.drop_last and len(block) < self.total):
            return None
        shares, decided_s = self._decide(step, len(block))
        offset = sum(shares[: self.rank])
        mine = block[offset : offset + shares[self.rank]] or list(islice(cycle(block), self.least))
        return shares, mine, len(block), decided_s

    def _own(self, step: int, samples: _Buffer) -> tuple[tuple[int, ...], list[Any], int, float]:
        shares, decided_s = self._decide(step, self.total)
        wanted = shares[self.rank] or self.least
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
