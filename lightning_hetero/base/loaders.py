"""Copies of a fit's train loaders that read what the engine says, and their state in a checkpoint (layer L).

    the user's loader -> what is it, do the ranks agree? -> its order [orders] -> a copy, which the Trainer reads
    of engines that divide batches: a pass begins -> bind -> split, once per batch -> parts handed out -> open

A fit on one device: stock DDP's, except for a global batch that was set or that a checkpoint brings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.orders import OrderFinder, own_data_in
from lightning_hetero.data.batches import GlobalBatchSampler, HandedParts, Part
from lightning_hetero.data.copies import fed_copy, users_own
from lightning_hetero.data.loader import IndivisibleError, LoaderSpec, rebatched_loader
from lightning_hetero.data.order import Channel, EpochOrder
from lightning_hetero.data.stream import RebatchedStream, StreamMode


@dataclass(eq=False, kw_only=True, slots=True)
class BoundLoader:
    """One train loader and its copy.

    Attributes:
        spec: what the user's loader is.
        full: samples of all ranks in a full batch of the copy.
        order: of its samples; None: a stream, which has no order.
        handed: parts that the copy has handed out and nobody has opened yet.
        loader: the copy, once there is one.
        sampler: of its batches; not of a stream.
    """

    spec: LoaderSpec
    full: int
    order: EpochOrder | None
    handed: HandedParts = field(default_factory=HandedParts)
    loader: Any = None
    sampler: Any = None


Bound = TypeVar("Bound", bound=BoundLoader)


class LoaderBinder(ABC, Generic[Bound]):
    """Replaces train loaders by copies.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges at set-up and epoch starts.
        strategy_name: class of the strategy, for messages.
        shared: the strategy's arguments on batches.
        stream: what an `IterableDataset` is; ``None``: the strategy takes none, or was not told.

    Attributes:
        orders: finds each loader's order; its ``resume`` is set before the loaders are processed.
        trained: see `EngineRun.trained`.
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, *, strategy_name: str, shared: SharedSettings,
        stream: StreamMode | None,
    ) -> None:  # fmt: skip
        self.orders = OrderFinder(
            trainer, channel, strategy_name=strategy_name, global_batch_size=shared.global_batch_size,
            batch_sampler=shared.batch_sampler, stream=stream,
        )  # fmt: skip
        self._trainer, self._channel, self._strategy_name = trainer, channel, strategy_name
        self._own_data, self._compared = shared.own_data, False
        self._counted = shared.weight_in(trainer.lightning_module) is not None
        self._bound: list[Bound] = []
        self.trained: tuple[int, int] | None = None

    def count(self, samples: int) -> None:
        """A global batch of so many samples is trained."""
        before = self.trained or (0, 0)
        self.trained = before[0] + samples, before[1] + 1

    @abstractmethod
    def process(self, loader: object) -> DataLoader:
        """Returns the copy of one train loader.

        Raises:
            TypeError, ValueError: the loader does not suit the engine, or the ranks' loaders differ.
        """

    def inspect(self, loader: object) -> LoaderSpec:
        """Returns what a train loader is, of which the engine needs to divide the batches.

        Raises:
            TypeError: they cannot be divided; with the reason, what would be needed and who takes them unchanged.
        """
        try:
            return self.orders.inspect(loader)
        except IndivisibleError as error:
            raise TypeError(
                f"{error}. Or use strategy='hetero_balanced', which trains such loaders in equal parts, as stock DDP"
                " does"
            ) from None

    def refuse_own_data(self, loader: DataLoader) -> None:
        """Refuses samples that cannot be moved between ranks; a collective.

        Raises:
            TypeError: index i is not the same sample on every rank.
        """
        if why := self._why_own([loader]):
            raise TypeError(f"{why}. Or use strategy='hetero_balanced', which leaves such samples with their rank")

    def _why_own(self, loaders: Sequence[DataLoader]) -> str | None:
        """Returns why samples cannot be moved between ranks; found out once, not when loaders are loaded again."""
        if self._compared:
            return None
        why = own_data_in(loaders, self._own_data, self._trainer, self._channel)
        self._compared = why is None
        return why

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's state, of this engine or another; before `process`."""
        self.orders.resume = state

    @property
    def primary(self) -> Bound | None:
        """The loader that counts; None before one was processed."""
        return self._bound[-1] if self._bound else None

    @property
    def global_batch_size(self) -> int | None:
        """Samples of all ranks per batch of the user's loader; None before it is known."""
        primary = self.primary
        if primary is None:
            return None
        return primary.order.global_batch_size if primary.order is not None else primary.full

    def stands_for_part(self, batch_size: int) -> bool:
        """Whether a number given as ``self.log(..., batch_size=)`` is a constant that means a rank's equal part.

        The loader's own ``batch_size``, and 1, by which all batches count the same.
        """
        primary = self.primary
        return batch_size == 1 or (primary is not None and batch_size == primary.spec.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types."""
        primary = self.primary
        return {
            "world_size": self._channel.world_size, "global_batch_size": self.global_batch_size,
            "batch_size": None if primary is None else primary.spec.batch_size,
            "orders": [bound.order.state_dict() if bound.order is not None else {} for bound in self._bound],
            "applied": self.orders.applied(self._bound[0].order if self._bound else None),
        }


class PartBinder(LoaderBinder[Bound]):
    """Copies whose batches are this rank's parts of global batches; where the Trainer stands says which come next."""

    _stale = True  # loaders were (re)loaded since `bind`

    @abstractmethod
    def bind(self) -> None:
        """Called when a pass over a copy begins and the loaders in use may be others than before."""

    @abstractmethod
    def split(self, bound: Bound, epoch: int, step: int, total: int) -> tuple[int, ...]:
        """Returns samples per rank of a batch of ``total`` samples, the same on all ranks; called in order."""

    def open(self, step: int) -> Part:
        """Returns this rank's part of batch ``step``, once the loader has handed it out."""
        part = self._bound[0].handed.take(step)
        if part is None:
            raise RuntimeError(f"no part is known for training batch {step}; this is a bug of lightning_hetero")
        self.count(sum(part.shares))
        return part

    def _inspect(self, loader: object) -> tuple[DataLoader, LoaderSpec, int]:
        """Returns the loader, what it is, and the ranks' furthest read-ahead; a collective."""
        loader = users_own(loader)
        spec = self.inspect(loader)
        assert isinstance(loader, DataLoader)
        return loader, spec, self.orders.agree(spec)

    def _read_parts(self, bound: Bound, loader: DataLoader, *, least: int = 1) -> DataLoader:
        """Makes the copy of a map-style dataset's loader, see `GlobalBatchSampler`."""
        assert bound.order is not None
        sampler = GlobalBatchSampler(
            bound.order, split=partial(self.split, bound), rank=self._channel.rank, least=least
        )
        bound.sampler = sampler
        sampler.epoch = compat.epoch_running(self._trainer)  # for who looks at a batch before the epoch starts
        bound.loader = rebatched_loader(
            loader, sampler, position=lambda: self._begin()[1],
            restarts=lambda: compat.behind_the_epoch(self._trainer), on_fetch=bound.handed.append,
            counted=self._counted,
            looks_on=lambda it: 0 if compat.is_train_iterator(self._trainer, it) else self._channel.world_size,
        )  # fmt: skip
        return self._add(bound)

    def _read_stream(self, bound: Bound, loader: DataLoader, mode: StreamMode, *, least: int = 1) -> DataLoader:
        """Makes the copy of a loader of an iterable dataset, see `RebatchedStream`."""
        stream = RebatchedStream(
            loader=loader, mode=mode, channel=self._channel, global_batch_size=bound.full,
            split=partial(self.split, bound), least=least, position=partial(self._begin_stream, bound),
            on_fetch=bound.handed.append, trains=partial(compat.is_train_iterator, self._trainer),
            limit=partial(compat.fetch_limit, self._trainer),
        )  # fmt: skip
        bound.loader = fed_copy(loader, stream)
        return self._add(bound)

    def _add(self, bound: Bound) -> DataLoader:
        self._bound.append(bound)
        self._stale = True
        return bound.loader

    def _begin(self) -> tuple[int, int]:
        """A pass over a copy begins: returns the epoch, and the number of the next batch in it."""
        if self._stale:
            current = compat.train_loaders(self._trainer)  # others were replaced by reloading; all, before it has any
            self._bound = [bound for bound in self._bound if any(bound.loader is c for c in current)] or self._bound
            self.bind()
            self._stale = False
        return compat.epoch_running(self._trainer), compat.upcoming_batch(self._trainer)

    def _begin_stream(self, bound: Bound) -> tuple[int, int, int]:
        epoch, _ = self._begin()
        first = 0 if compat.last_batch_done(self._trainer) else compat.batches_trained(self._trainer)
        return epoch, first, self.used(bound, first)

    def used(self, bound: Bound, batches: int) -> int:
        """Returns how many samples of what this rank reads the first batches of the epoch have used."""
        return batches * bound.full


class OneDeviceFit:
    """What a fit on one device has of an engine: nothing, as long as stock DDP's batches will do.

    They do not if the user asked for a ``global_batch_size``, or if a checkpoint of several devices is resumed: it
    goes on with the batches it has stopped in, in the same order.

    Args:
        trainer: the running trainer.
        shared: the strategy's arguments on batches.
        strategy_name: class of the strategy, for messages.
    """

    def __init__(self, trainer: Trainer, shared: SharedSettings, strategy_name: str) -> None:
        self._trainer, self._shared, self._strategy_name = trainer, shared, strategy_name
        self._binder: _WholeBatches | None = None
        self._batch_size: int | None = None
        self._undo: Callable[[], None] = lambda: None
        if shared.global_batch_size is not None:
            self._rebatch()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's state, of any engine, before the loaders are set up; empty: stock DDP's."""
        if state.get("world_size", 1) != 1 or (state.get("applied") or {}).get("tick"):
            self._rebatch()
        if self._binder is not None:
            self._binder.resume(state)

    def process(self, loader: object) -> object:
        """Returns the train loader itself, or its copy with other batches.

        Raises:
            TypeError, ValueError: a ``global_batch_size`` was asked for, and the loader's batches cannot be changed.
        """
        if isinstance(size := getattr(loader, "batch_size", None), int):
            self._batch_size = max(size, self._batch_size or 0)
        if self._binder is None:
            return loader
        try:
            return self._binder.process(loader)
        except TypeError:
            if self._shared.global_batch_size is not None:
                raise
            return loader

    @property
    def global_batch_size(self) -> int | None:
        """Samples per batch; None before they are known, or if the loader does not say."""
        known = None if self._binder is None else self._binder.global_batch_size
        return self._batch_size if known is None else known

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run on several devices needs to keep the global batch; empty if nobody knows it."""
        if self._binder is not None and self._binder.primary is not None:
            return self._binder.state_dict()
        size = self._batch_size
        return {} if size is None else {"world_size": 1, "global_batch_size": size, "batch_size": size}

    def close(self) -> None:
        """Ends the fit."""
        self._undo()

    def _rebatch(self) -> None:
        if self._binder is None:
            self._binder = _WholeBatches(self._trainer, self._shared, self._strategy_name)
            self._undo = compat.keep_train_sampler(self._trainer)


class _Alone:
    """A `Channel` of one rank."""

    rank, world_size = 0, 1

    def all_gather_object(self, value: object) -> list:
        return [value]

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        return lambda: [list(row)]

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]:
        return list(indices or ())

    def sum_async(self, value: float) -> Callable[[], float]:
        return lambda: value


class _WholeBatches(PartBinder[BoundLoader]):
    """Copies whose batches are whole global batches; no note is needed of which part each of them is."""

    def __init__(self, trainer: Trainer, shared: SharedSettings, strategy_name: str) -> None:
        super().__init__(trainer, _Alone(), strategy_name=strategy_name, shared=shared, stream="shared")

    def process(self, loader: object) -> DataLoader:
        loader, spec, _ = self._inspect(loader)
        if spec.kind == "stream":
            full = self.orders.batch_of_all(spec)
            bound = BoundLoader(spec=spec, full=full, order=None, handed=HandedParts(maxlen=0))
            return self._read_stream(bound, loader, "shared")
        order = self.orders.order(loader, spec, len(self._bound))
        if not self._bound:
            order = self.orders.continued(order)
        self.orders.check_position(order.global_batch_size)
        full = order.global_batch_size
        bound = BoundLoader(spec=spec, full=full, order=order, handed=HandedParts(maxlen=0))
        return self._read_parts(bound, loader)

    def bind(self) -> None:
        """Nothing depends on which loaders are in use."""

    def split(self, bound: BoundLoader, epoch: int, step: int, total: int) -> tuple[int, ...]:
        return (total,)
