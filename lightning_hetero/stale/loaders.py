"""The train loader's copy that trains what the server grants (layer L)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.loader import inspect_loader
from lightning_hetero.data.ticks import SampleSource, TickSampler, tick_loader
from lightning_hetero.glue.orders import OrderFinder

if TYPE_CHECKING:
    from lightning_hetero.stale.run import StaleRun

__all__ = ["LoaderBinder"]


class LoaderBinder:
    """Binds the one train loader of a fit to its loop.

    Args:
        run: the fit on this rank; has strategy, trainer and channel.

    Attributes:
        sampler, source: order and samples of the loader; None before it is known.
    """

    def __init__(self, run: StaleRun) -> None:
        self._run = run
        strategy = run.strategy
        self._orders = OrderFinder(
            run.trainer,
            run.channel,
            strategy_name=type(strategy).__name__,
            global_batch_size=strategy.settings_global_batch_size,
            batch_sampler=strategy.batch_sampler,
            stream=None,
        )
        self.sampler: TickSampler | None = None
        self.source: SampleSource | None = None
        self._batch_size: int | None = None

    def resume(self, stored: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint, of this strategy or another; before `process`."""
        self._orders.resume = stored

    def process(self, loader: object) -> DataLoader:
        """Returns the copy of the train loader that trains what the server grants.

        Raises:
            TypeError, ValueError: the loader's samples cannot be granted one by one, or the ranks' loaders differ.
        """
        run, orders = self._run, self._orders
        spec = inspect_loader(loader)
        assert isinstance(loader, DataLoader)
        if spec.kind == "stream":
            raise TypeError(
                "the train dataset is an IterableDataset, whose samples have no positions that could be granted to one"
                " rank or another; use a map-style dataset, strategy='hetero_balanced' or strategy='ddp'"
            )
        if self.sampler is not None and run.loop is None:
            raise TypeError(
                "several train loaders: samples are granted from one order, which several loaders do not have. Combine"
                " the datasets (torch.utils.data.StackDataset or ConcatDataset), or use strategy='hetero_balanced'"
            )
        if run.strategy.newcomer is None:
            orders.agree(spec)
        elif spec.kind != "plain":
            raise TypeError(
                "a rank cannot join a run whose order of samples the ranks draw together (a sampler or batch sampler of"
                " your own): start all ranks again from the last checkpoint"
            )
        if spec.kind == "plain" and (size := self._settled_batch(spec.batch_size)) is not None:
            orders.settle(size)
        order = orders.order(loader, spec, 0)
        orders.check_position(order.global_batch_size)
        self._batch_size = spec.batch_size
        self.sampler = TickSampler(order)
        self.source = SampleSource(loader)
        if run.loop is not None:
            run.loop.claims.bind(self.sampler, self.source)
        self.sampler.set_epoch(compat.epoch_running(run.trainer))
        return tick_loader(loader, self.sampler, self.source, self._ticks)

    def _settled_batch(self, batch_size: int | None) -> int | None:
        """Samples of a global batch that do not follow from the number of ranks that are here, if so."""
        run = self._run
        stored, devices = self._orders.resume.get("global_batch_size"), run.strategy.world_size
        if run.strategy.newcomer is not None:
            return stored  # what the members have, whatever they once resumed from
        if stored or batch_size is None or run.strategy.settings_global_batch_size or len(run.alive) == devices:
            return None
        return batch_size * devices  # a rank died in an earlier fit: batches stay as large as they were then

    def _ticks(self, iterator: object) -> Iterator[Any]:
        run = self._run
        if run.loop is None or not compat.is_train_iterator(run.trainer, iterator):
            return self._look()
        return run.loop.claims.ticks()

    def _look(self) -> Iterator[Any]:
        """What stock DDP would show to somebody who looks at the loader: equal parts. Nothing is claimed."""
        sampler, source = self.sampler, self.source
        assert sampler is not None and source is not None
        rank, world = self._run.strategy.global_rank, self._run.strategy.world_size
        start = 0
        for end in sampler.ends:
            part = range(start + rank * (end - start) // world, start + (rank + 1) * (end - start) // world)
            yield source.look([sampler.indices[p] for p in part] or [sampler.indices[start]])
            start = end

    @property
    def global_batch_size(self) -> int | None:
        """Samples per update; None before the loader is known."""
        return None if self.sampler is None else self.sampler.order.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs of the loader, as plain types."""
        return {
            "global_batch_size": self.global_batch_size,
            "batch_size": self._batch_size,
            "orders": [self.sampler.order.state_dict()] if self.sampler is not None else [],
        }

    def close(self) -> None:
        """Ends the workers that fetch ahead."""
        if self.source is not None:
            self.source.end()
