"""The order of an epoch: which samples make global batch t, agreed by all ranks, independent of any share (layer T).

| the user's loader has                                   | global batch t is                                        |
|---------------------------------------------------------|----------------------------------------------------------|
| no custom sampler (``shuffle`` on or off)               | what stock DDP trains on: ``DistributedSampler``'s order |
| its own ``Sampler``                                     | the next B of rank 0's sequence, sent to all             |
| ``DistributedSampler``                                  | what the ranks' samplers draw together                   |
| any sampler, ``use_distributed_sampler=False``          | the ranks' own t-th batches, pooled                      |
| its own batch sampler, on request                       | ``world_size`` batches in a row, pooled                  |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DistributedSampler

from lightning_hetero.data.samplers import announce_epoch, draw, undrawn


class SizedSampler(Protocol):
    """A sampler, or batch sampler, with a length."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class Channel(Protocol):
    """The few exchanges that reading needs; those of objects block, at set-up and at the start of an epoch."""

    rank: int
    world_size: int

    def all_gather_object(self, value: object) -> list: ...

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]: ...

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]: ...

    def sum_async(self, value: float) -> Callable[[], float]: ...


class EpochOrder(ABC):
    """The global batches of each epoch.

    Attributes:
        global_batch_size: samples of a full global batch.
        drop_last: whether a last batch that is not full is left out.
    """

    global_batch_size: int
    drop_last: bool = False
    _announced: int | None = None

    @property
    def source(self) -> object:
        """The user's sampler or batch sampler that is drawn from; None: no sampler."""
        return None

    def announce(self, epoch: int) -> None:
        """Tells the user's sampler the epoch. What it reads when it is drawn may be set until then."""
        self._announced = epoch
        announce_epoch(self.source, epoch)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, dropped ones included; None where only drawing tells."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of global batches of an epoch."""

    def batches(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        """Returns ``(indices, ends)``: global batch t is ``indices[ends[t-1]:ends[t]]``. May communicate."""
        if self._announced != epoch:
            self.announce(epoch)
        return self._drawn(epoch)

    @abstractmethod
    def _drawn(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        """Returns `batches`, once the sampler knows the epoch."""

    def look(self, epoch: int, rank: int, world_size: int) -> list[list[Any]]:
        """Returns what stock DDP would show a rank that looks at the loader before the epoch is drawn.

        Nothing is said to other ranks, and generators are unchanged.
        """
        return equal_parts(*self._drawn(epoch), rank, world_size)

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

    @property
    def num_samples(self) -> int:
        return self.samples

    def __len__(self) -> int:
        return len(self._ends(self.num_samples))

    def _ends(self, samples: int) -> Sequence[int]:
        size = self.global_batch_size
        ends = range(size, samples + 1, size)
        return ends if self.drop_last or samples % size == 0 else [*ends, samples]

    def _drawn(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        indices = self.indices(epoch)
        return indices, self._ends(len(indices))

    @abstractmethod
    def indices(self, epoch: int) -> Sequence[Any]:
        """Returns the epoch's whole sequence."""


class ShuffledOrder(FixedSizeOrder):
    """The order of torch's ``DistributedSampler`` before it deals the samples out to ranks, and without its padding.

    Args:
        sampler: the one of stock DDP; its seed, epoch and ``shuffle`` count as they are when the epoch is drawn: a hook
            may set them.
        global_batch_size, drop_last: see `FixedSizeOrder`.
    """

    def __init__(self, sampler: DistributedSampler, *, global_batch_size: int, drop_last: bool) -> None:
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        super().__init__(samples, global_batch_size=global_batch_size, drop_last=drop_last)
        self.sampler = sampler

    @property
    def source(self) -> object:
        return self.sampler

    def indices(self, epoch: int) -> Sequence[int]:
        own = self.sampler
        if not own.shuffle:
            return range(self.samples)
        generator = torch.Generator().manual_seed(own.seed + own.epoch)
        return torch.randperm(self.samples, generator=generator).tolist()


class SamplerOrder(FixedSizeOrder):
    """A user's own sampler: rank 0 draws it once per epoch, everybody gets the same sequence.

    A sampler without its own generator draws from the global one, so the draw is done under a seed made of
    ``seed + epoch``: reproducible on resume, and the ranks' own random streams stay untouched. A sampler with its own
    ``generator`` keeps it; its state at the start of the epoch goes into the checkpoint.

    Its length is what it says at the time: a curriculum's may grow from epoch to epoch.

    Args:
        sampler: sized iterable of indices.
        seed: see above.
        channel: sends rank 0's draw to the others.
        global_batch_size, drop_last: see `FixedSizeOrder`.
    """

    def __init__(
        self, sampler: SizedSampler, *, seed: int, channel: Channel, global_batch_size: int, drop_last: bool
    ) -> None:
        super().__init__(len(sampler), global_batch_size=global_batch_size, drop_last=drop_last)
        self.sampler = sampler
        self.seed = seed
        self.channel = channel
        self._state: dict[str, Any] = {}
        self._restored: dict[str, Any] = {}

    @property
    def source(self) -> object:
        return self.sampler

    @property
    def num_samples(self) -> int:
        return len(self.sampler)

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def indices(self, epoch: int) -> Sequence[Any]:
        generator = self._generator
        if generator is not None:
            self._rewind(generator, epoch)
            self._state = {"epoch": epoch, "generator": generator.get_state()}
        drawn = draw(self.sampler, self.seed + epoch) if self.channel.rank == 0 else None
        if drawn is not None and len(drawn) != self.num_samples:
            raise ValueError(
                f"sampler {type(self.sampler).__name__} announced {self.num_samples} samples but gave {len(drawn)};"
                " its __len__ must be the number of indices it yields"
            )
        return self.channel.broadcast_indices(drawn)

    def look(self, epoch: int, rank: int, world_size: int) -> list[list[Any]]:
        with undrawn(self.sampler, self.seed + epoch):
            indices = list(self.sampler)
        return equal_parts(indices, self._ends(len(indices)), rank, world_size)

    def _rewind(self, generator: torch.Generator, epoch: int) -> None:
        """Puts the generator where it was before ``epoch`` in the run that wrote the checkpoint.

        A checkpoint from the end of an epoch knows only that epoch's start: it is drawn once more to get to its end.
        """
        behind = epoch - self._restored.get("epoch", epoch + 1)
        if behind < 0:
            return
        generator.set_state(self._restored["generator"])
        self._restored = {}
        if self.channel.rank == 0:
            for _ in range(behind):
                draw(self.sampler, self.seed)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state, self._restored = dict(state), dict(state)


class ContinuedOrder(EpochOrder):
    """An order whose running epoch another engine has begun, with samples taken in another sequence.

    In that epoch the samples already trained on come first, so that the batches from ``step`` on hold exactly the
    others, each once; all other epochs are the inner order's. There may be more or fewer than ``step`` batches have.

    Args:
        order: the inner order.
        epoch: the epoch that was begun.
        step: batches of it that were trained.
        spans: positions ``[start, end)`` of the samples that were trained on.
    """

    def __init__(self, order: EpochOrder, *, epoch: int, step: int, spans: Sequence[Sequence[int]]) -> None:
        self.order = order
        self.epoch, self.step = epoch, step
        self.spans = sorted((int(start), int(end)) for start, end in spans)
        self.global_batch_size = order.global_batch_size
        self.drop_last = order.drop_last
        self._inner: tuple[Sequence[Any], Sequence[int]] | None = None  # as drawn in the epoch that was begun

    @property
    def source(self) -> object:
        return self.order.source

    @property
    def num_samples(self) -> int | None:
        return self.order.num_samples

    def __len__(self) -> int:
        return len(self.order)

    def look(self, epoch: int, rank: int, world_size: int) -> list[list[Any]]:
        return self.order.look(epoch, rank, world_size)

    def announce(self, epoch: int) -> None:
        self._announced = epoch
        self.order.announce(epoch)

    def _drawn(self, epoch: int) -> tuple[Sequence[Any], Sequence[int]]:
        if epoch != self.epoch or not self.step:
            return self.order.batches(epoch)
        if self._inner is None:
            self._inner = self.order.batches(epoch)
        indices, ends = self._inner
        trained = [i for start, end in self.spans for i in indices[start:end]]
        others = [i for start, end in self._others(len(indices)) for i in indices[start:end]]
        # Where fewer were trained than these batches have, those are noted as smaller, and the rest is spread over the
        # others; samples trained ahead make the next batches smaller, never empty.
        before = [min(end, len(trained) - self.step + 1 + i) for i, end in enumerate(ends[: self.step - 1])]
        moved = [*before, len(trained)]
        behind, others_left = max(0, ends[self.step - 1] - len(trained)), len(ends) - self.step
        for i, end in enumerate(ends[self.step :], 1):
            moved.append(max(end - behind * (others_left - i) // others_left, moved[-1] + 1))
        return [*trained, *others], moved

    def trained(self, step: int) -> list[tuple[int, int]]:
        """Returns the spans, in the inner order, of what is trained after ``step`` batches of the continued epoch."""
        _, ends = self._drawn(self.epoch)
        assert self._inner is not None
        indices, _ = self._inner
        left = ends[step - 1] - sum(end - start for start, end in self.spans)
        spans = list(self.spans)
        for start, end in self._others(len(indices)):
            taken = min(left, end - start)
            if taken > 0:
                spans.append((start, start + taken))
                left -= taken
        return sorted(spans)

    def _others(self, samples: int) -> list[tuple[int, int]]:
        """Returns the spans between those that were trained on."""
        borders = [0, *(p for span in self.spans for p in span), samples]
        return list(zip(borders[::2], borders[1::2], strict=True))

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order.load_state_dict(state)


def equal_parts(indices: Sequence[Any], ends: Sequence[int], rank: int, world_size: int) -> list[list[Any]]:
    """Returns one rank's part of each batch, where all get equal ones; of a batch with too few samples its first."""
    parts, start = [], 0
    for end in ends:
        cuts = [start + r * (end - start) // world_size for r in (rank, rank + 1)]
        parts.append(list(indices[slice(*cuts)] or indices[start : start + 1]))
        start = end
    return parts


def concatenate(pools: Iterable[Iterable[Sequence[Any]]]) -> tuple[list[Any], list[int]]:
    """Returns the flat sequence of all pools' batches and the end of each pool."""
    flat: list[Any] = []
    ends: list[int] = []
    for pool in pools:
        for batch in pool:
            flat.extend(batch)
        ends.append(len(flat))
    return flat, ends
