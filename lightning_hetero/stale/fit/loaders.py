"""The train loader's copy that trains what the server assigns (layer L)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.loaders import BoundLoader, LoaderBinder
from lightning_hetero.data.assigned import SampleSource, assigned_loader
from lightning_hetero.data.copies import fed_copy, users_own
from lightning_hetero.data.loader import LoaderSpec, probed
from lightning_hetero.data.own_stream import OwnStreamFeed
from lightning_hetero.stale.fit.global_steps import GlobalSteps
from lightning_hetero.stale.fit.own_samples import OwnSamples
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class AssignedBinder(LoaderBinder[BoundLoader]):
    """Binds the one train loader of a fit to its loop.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges of all ranks.
        members: who takes part.
        shared: the strategy's arguments on batches.
        stream: what an `IterableDataset` is.

    Attributes:
        source: samples of the loader in their order; None before it is known.
        steps: trains what is assigned of it; None before training.
    """

    def __init__(
        self, trainer: Trainer, channel: SideChannel, members: Members, shared: SharedSettings,
        stream: Literal["finite"] | None,
    ) -> None:  # fmt: skip
        name = type(trainer.strategy).__name__
        super().__init__(trainer, channel, strategy_name=name, shared=shared, stream=stream)
        self._members, self._asked_batch, self._stream = members, shared.global_batch_size, stream
        self.source: SampleSource | OwnSamples | None = None
        self.steps: GlobalSteps | None = None

    def process(self, loader: object) -> DataLoader:
        """Returns the copy of the train loader that trains what the server assigns.

        Raises:
            TypeError, ValueError: the loader's samples cannot be assigned one by one, or the ranks' loaders differ.
        """
        orders = self.orders
        loader = users_own(loader)
        spec = self.inspect(loader)
        assert isinstance(loader, DataLoader)
        if spec.kind == "stream" and self._stream is None:
            raise TypeError(
                "the train dataset is an IterableDataset, whose samples have no positions that could be assigned to one"
                f" rank or another. Say {self._strategy_name}(stream='finite') if every rank has its own stream that"
                " ends; or use strategy='hetero_balanced' with stream='infinite' or 'shared'"
            )
        if probed(loader)[1]:
            raise TypeError(
                f"{type(loader).__name__} has its own iterator, through which samples that are assigned to one rank or"
                " another do not pass: change batches in collate_fn or on_after_batch_transfer, or use"
                " strategy='hetero_balanced'"
            )
        if self.source is not None and self.steps is None:
            raise TypeError(
                "several train loaders: samples are assigned from one order, which several loaders do not have."
                " Combine the datasets (torch.utils.data.StackDataset or ConcatDataset), or use"
                " strategy='hetero_balanced'"
            )
        if spec.kind == "stream":
            return self._own_stream(loader, spec)
        if not self._members.joining:
            orders.agree(spec)
            self.refuse_own_data(loader)
        elif spec.kind != "plain":
            raise TypeError(
                "a rank cannot join a run whose order of samples the ranks draw together (a custom sampler or batch"
                " sampler): start all ranks again from the last checkpoint"
            )
        if spec.kind == "plain" and (size := self._settled_batch(spec.batch_size)) is not None:
            orders.settle(size)
        order = orders.order(loader, spec, 0)
        orders.check_position(order.global_batch_size)
        self.source = source = SampleSource(loader, order, counted=self._counted)
        if self.steps is not None:
            self.steps.source = source
        source.sampler.epoch = compat.epoch_running(self._trainer)  # for a look at a batch before the epoch starts
        bound = BoundLoader(spec=spec, full=order.global_batch_size, order=order)
        bound.loader = assigned_loader(loader, source, self._batches)
        self._bound = [bound]  # instead of one that was there before a reload
        return bound.loader

    def _own_stream(self, loader: DataLoader, spec: LoaderSpec) -> DataLoader:
        """Returns the copy of the loader of this rank's own finite stream, see `OwnSamples`."""
        trainer, world = self._trainer, self._members.world_size
        if self._members.joining:
            raise TypeError(
                "a rank cannot join a run in which each rank trains its own stream (stream='finite'): start all ranks"
                " again from the last checkpoint"
            )
        if not trainer.lightning_module.automatic_optimization:
            raise TypeError(
                "stream='finite' cannot be combined with manual optimization here: steps within a batch are counted by"
                " samples that any rank may have. Use automatic optimization, or strategy='hetero_balanced'"
            )
        self.orders.agree(spec)
        total = self.orders.batch_of_all(spec)
        used = self.orders.resume.get("used", ())
        self.source = source = OwnSamples(
            loader, self._channel, self._members, batch_of_all=total, counted=self._counted,
            used={compat.batches_trained(trainer): used} if len(used) == world else {},
        )  # fmt: skip
        if self.steps is not None:
            self.steps.source = source
        bound = BoundLoader(spec=spec, full=total, order=None)
        feed = OwnStreamFeed(source, self._trained, partial(compat.fetch_singly, trainer))
        bound.loader = fed_copy(loader, feed)
        self._bound = [bound]
        return bound.loader

    def _trained(self, iterator: object) -> Iterator[Any] | None:
        """Returns the batches that are trained, for the iterator that the Trainer reads; None for another."""
        ours = self.steps is not None and compat.is_train_iterator(self._trainer, iterator)
        return self.steps.batches() if ours and self.steps is not None else None

    def _settled_batch(self, batch_size: int | None) -> int | None:
        """Samples of a global batch that do not follow from the number of ranks that are here, if so."""
        stored, members = self.orders.resume.get("global_batch_size"), self._members
        if members.joining:
            return stored  # what the members have, whatever they once resumed from
        if stored or batch_size is None or self._asked_batch or not members.missing:
            return None
        # A rank died in an earlier fit: batches stay as large as they were then.
        return batch_size * members.world_size

    def _batches(self, iterator: object) -> Iterator[Any]:
        return self._trained(iterator) or self._look()

    def _look(self) -> Iterator[Any]:
        assert isinstance(self.source, SampleSource)
        yield from map(self.source.look, self.source.sampler.look(self._members.rank, self._members.world_size))

    def close(self) -> None:
        """Ends the workers that fetch ahead."""
        if self.source is not None:
            self.source.end()
