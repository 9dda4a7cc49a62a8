"""Iterable datasets: the loader's samples are re-batched in the main process, with no read-ahead to wait out (layer T).

``infinite``: every rank has its own endless stream and takes as many samples as its share.
``shared``: every rank reads the same stream; of each global batch a rank keeps its part and skips the rest.
``finite``: every rank has its own stream, which ends when it ends. A rank takes as many samples as its share or as are
left, then none, until all ranks are through:

    rank 0   | 5 | 5 | 2 | 0 | 0 |        how many each has is gathered one batch ahead: it travels while the batch
    rank 1   | 3 | 3 | 3 | 3 | 1 |  end   before is trained, nobody waits for it, and the end comes at one step for all

It does not travel with the record of a step: that one may come every k-th step only, and after the step. What a rank
has left cannot be moved, so streams of equal length take as long as the slowest rank needs for its own.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, cycle, islice
from typing import Any, Literal, NoReturn

from torch.utils.data import DataLoader

from lightning_hetero.data.batches import Part, Split
from lightning_hetero.data.copies import BatchFeed, LazyIterator, altered_copy, keep_samples
from lightning_hetero.data.order import Channel

StreamMode = Literal["infinite", "shared", "finite"]
_Numbers = Callable[[], Sequence[Sequence[float]]]  # of samples, by rank, once they have come


def uncollated(loader: DataLoader, **more: Any) -> DataLoader:
    """Returns a copy of an iterable dataset's loader that hands out lists of all its samples, with other attributes."""
    chunks = copy.copy(loader.batch_sampler)
    object.__setattr__(chunks, "drop_last", False)  # our own drop_last is about the global batch
    return altered_copy(loader, collate_fn=keep_samples, drop_last=False, batch_sampler=chunks, **more)


def raise_no_length() -> NoReturn:
    """What a finite stream's loader says of its length, as `DataLoader` does without one."""
    raise TypeError("the batches of finite streams (stream='finite') are known when all ranks are through")


def raise_unknown_place(step: int) -> NoReturn:
    """Refuses to go on in an epoch where a checkpoint does not tell each rank's place in its own stream."""
    raise ValueError(
        f"training goes on after {step} batches in the middle of an epoch, and it is not known how many"
        " samples of their streams the ranks have used: resume from a checkpoint of stream='finite' on"
        " as many ranks as then, or from one made at the end of an epoch"
    )


@dataclass(kw_only=True)
class RebatchedStream(BatchFeed):
    """Hands out batches of an iterable-style ``loader`` that have this rank's share of samples.

    A fresh pass over the dataset for every epoch.

    Args:
        loader: yields samples in chunks of its ``batch_size``; its collate function is applied after re-batching.
        mode: see the module docstring.
        channel: of all ranks; finite streams exchange numbers of samples on it.
        global_batch_size: samples of all ranks together.
        split: decides the shares of a batch when it is drawn.
        least: samples of a dummy, for a rank without a share.
        position: epoch, batches of it already trained on, and the samples of this rank's stream that they have used.
        on_fetch: gets each part when its batch is handed out.
        trains: whether an iterator of the copy trains. Of a finite stream, who only looks gets the loader's batches.
        limit: batches of an epoch at most; of a finite stream nothing is drawn ahead of them.
    """

    loader: DataLoader
    mode: StreamMode
    channel: Channel
    global_batch_size: int
    split: Split
    least: int = 1
    position: Callable[[], tuple[int, int, int]]
    on_fetch: Callable[[Part], None]
    trains: Callable[[object], bool]
    limit: Callable[[], float]
    _dummy: list[Any] = field(default_factory=list, init=False)  # of a finite stream
    _held: list[Any] = field(default_factory=list, init=False)  # its samples that were drawn to see whether it ends

    def __post_init__(self) -> None:
        # Of a shared stream the ranks must see the samples in the same order.
        more: dict[str, Any] = {"in_order": True} if self.mode == "shared" else {}
        self._source = uncollated(self.loader, **more)

    @property
    def fetching(self) -> DataLoader:
        return self._source

    def length(self, own: Callable[[], int]) -> int:
        """Length of a sized stream in global batches; ``TypeError`` without one, as `DataLoader` does.

        Of an infinite stream the dataset's length is one rank's epoch, as under stock DDP; it is not where it ends.
        A finite one ends when all ranks are through, in how many batches follows from the shares of each.
        """
        if self.mode == "finite":
            raise_no_length()
        samples = len(self.loader.dataset)  # type: ignore[arg-type]
        if self.mode == "infinite":
            samples *= self.channel.world_size
        return samples // self.global_batch_size if self.loader.drop_last else -(-samples // self.global_batch_size)

    def iterate(self, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self.mode == "finite":
            return LazyIterator(lambda it: self._until_all_end() if self.trains(it) else iter(self.loader))
        return self._batches()

    def _begin(self) -> tuple[Iterator[Any], int, int]:
        """Returns the samples that come next, the epoch and the batch that they belong to."""
        samples = chain.from_iterable(self._source)
        epoch, first, passed = self.position()
        deque(islice(samples, passed), maxlen=0)  # skips them
        return samples, epoch, first

    def _batches(self) -> Iterator[Any]:
        samples, epoch, first = self._begin()
        for step in count(first):
            started_s = time.perf_counter()
            block: list[Any] = []
            total = self.global_batch_size
            if self.mode == "shared":
                block = list(islice(samples, total))
                if not block or (self.loader.drop_last and len(block) < total):
                    return
                total = len(block)
            asked_s = time.perf_counter()
            shares = self.split(epoch, step, total)
            started_s += time.perf_counter() - asked_s
            if self.mode == "shared":
                offset, share = sum(shares[: self.channel.rank]), shares[self.channel.rank]
                mine = block[offset : offset + share] or list(islice(cycle(block), self.least))
            else:
                mine = self._own(step, samples, shares)
            yield self._hand_out(epoch, step, mine, shares, started_s)

    def _hand_out(self, epoch: int, step: int, samples: list[Any], shares: tuple[int, ...], started_s: float) -> Any:
        """Returns the batch of these samples; its part is reported."""
        batch = self.loader.collate_fn(samples)
        self.on_fetch(
            Part(
                epoch=epoch, step=step, samples=shares[self.channel.rank], shares=shares,
                weight_base=float(sum(shares)), fetch_s=max(0.0, time.perf_counter() - started_s), dummy=self.least,
            )
        )  # fmt: skip
        return batch

    def _own(self, step: int, samples: Iterator[Any], shares: Sequence[int]) -> list[Any]:
        """Returns the next samples of this rank's own stream."""
        rank = self.channel.rank
        wanted = shares[rank] or self.least
        mine = list(islice(samples, wanted))
        if len(mine) < wanted:
            raise RuntimeError(
                f"the stream of rank {rank} was declared infinite (stream='infinite') but ended at batch {step}; say"
                " stream='finite' if it ends, or repeat the data"
            )
        return mine

    # ---- streams that end -----------------------------------------------------------------------------------------

    def _until_all_end(self) -> Iterator[Any]:
        samples, epoch, first = self._begin()
        step, limit, self._held = first, self.limit(), []
        coming = self._draw(samples, epoch, first)
        while coming is not None:
            mine, spent_s, rows = coming
            shares = tuple(int(number) for (number,) in rows())
            if isinstance(mine, Exception):
                raise mine
            if -1 in shares:
                rank = shares.index(-1)
                raise RuntimeError(f"the stream of rank {rank} failed at batch {step} of epoch {epoch}, see its error")
            if not any(shares):
                return
            if step == first and 0 in shares:  # perhaps it has not had any, and needs one for its dummy
                kept: list[list[Any]] = self.channel.all_gather_object(self._dummy)
                self._dummy = self._dummy or next(filter(None, kept))
            coming = self._draw(samples, epoch, step + 1) if step + 1 < limit else None
            started_s = time.perf_counter() - spent_s
            yield self._hand_out(epoch, step, mine or list(islice(cycle(self._dummy), self.least)), shares, started_s)
            step += 1

    def _draw(self, samples: Iterator[Any], epoch: int, step: int) -> tuple[list[Any] | Exception, float, _Numbers]:
        """Returns this rank's samples of a batch, the seconds spent on them, and what waits for all ranks' numbers.

        What a stream raises is returned with -1 samples, since the others would wait for this rank.
        """
        # Who has samples takes some: a batch of ranks that are all through is the end.
        share = max(self.least, self.split(epoch, step, self.global_batch_size)[self.channel.rank])
        started_s = time.perf_counter()
        ahead = 0 if self.loader.drop_last or self.least == 1 else self.least
        mine, taken = self._held, share
        try:
            mine += islice(samples, share + ahead - len(mine))
        except Exception as error:
            return error, 0.0, self.channel.all_gather_row([-1.0])
        if self.loader.drop_last and len(mine) < share:
            mine = []
        elif 0 < len(mine) - share < ahead:  # what is left would be too few for a batch
            taken = len(mine) - self.least if len(mine) >= 2 * self.least else len(mine)
        mine, self._held = mine[:taken], mine[taken:]
        spent_s = time.perf_counter() - started_s
        self._dummy = self._dummy or mine[: self.least]
        return mine, spent_s, self.channel.all_gather_row([float(len(mine))])
