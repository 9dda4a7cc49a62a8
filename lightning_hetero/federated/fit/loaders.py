"""Each rank's own train loader, read batch by batch; which of its batches comes next (layer L)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.loaders import BoundLoader, LoaderBinder
from lightning_hetero.data.copies import fed_copy, users_own
from lightning_hetero.data.loader import IndivisibleError, LoaderSpec, inspect_loader
from lightning_hetero.data.own_stream import OwnStreamFeed
from lightning_hetero.federated.decide.rounds import UNCOUNTED, Client
from lightning_hetero.federated.runtime.own import ClientStream, DataPlace, Issued, OwnBatches, OwnFeed, OwnOrder
from lightning_hetero.transport.side_channel import SideChannel

Reading = Callable[[DataPlace], Iterator[tuple[Any, Issued]]]
"""Draws a rank's own batches from a place on, each with a note of what it is."""


class OwnBinder(LoaderBinder[BoundLoader]):
    """Binds each rank's one train loader; nothing is divided or sent.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges of all ranks.
        shared: the strategy's arguments on batches.
        stream: what an `IterableDataset` is.
        opened: takes what this rank trains on and returns the batches of an epoch; a collective.
        epoch: yields the batches of an epoch, or of the rest of one; given what draws them.
        size: returns the samples of the next batch to be drawn; None: batches are the loader's.

    Attributes:
        place: of this rank in its data, behind the last batch that it trained on.
        placed: whether a checkpoint has said so.
        stream: this rank's finite stream; None: its data are map-style.
        clients: what each rank that is there trains on, by rank, as far as it is known.
        asked_batch: samples of all ranks per local step, if the user has said so.
    """

    def __init__(
        self, trainer: Trainer, channel: SideChannel, shared: SharedSettings, stream: Literal["finite"] | None, *,
        opened: Callable[[Client], int], epoch: Callable[[Reading], Iterator[Any]], size: Callable[[], int] | None,
    ) -> None:  # fmt: skip
        super().__init__(trainer, channel, strategy_name="FederatedStrategy", shared=shared, stream=stream)
        self._takes_streams = stream is not None
        self.place, self.placed = DataPlace(), False
        self.stream: ClientStream | None = None
        self.clients: dict[int, Client] = {}
        self.asked_batch = shared.global_batch_size
        self._opened, self._epoch, self._size = opened, epoch, size

    def inspect(self, loader: object) -> LoaderSpec:
        """Returns what a train loader is.

        Raises:
            TypeError: batches of it cannot be counted or drawn again.
        """
        try:
            if compat.uses_dataloader_iter(self._trainer):
                raise IndivisibleError(
                    "training_step(dataloader_iter) fetches its own batches, so they cannot be counted: take `batch`"
                    " instead"
                )
            return inspect_loader(loader)
        except IndivisibleError as error:
            raise TypeError(f"{error}. FederatedStrategy reads each rank's own DataLoader") from None

    def announce(self, loaders: Sequence[object]) -> None:
        """Takes the train loaders that will be processed next.

        Raises:
            TypeError: there are several, or a learning rate is to be found.
        """
        if compat.finds_learning_rate(self._trainer):
            raise TypeError(
                "a learning-rate finder needs the loss of one update after the other, and here ranks make local steps"
                " between two averages: find the rate on one device, or with strategy='hetero_balanced'"
            )
        if len(loaders) > 1:
            raise TypeError(
                "several train loaders: a rank's own data are one loader. Combine the datasets"
                " (torch.utils.data.StackDataset or ConcatDataset), or use strategy='hetero_balanced'"
            )

    def process(self, loader: object) -> DataLoader:
        """Returns the copy of this rank's train loader that it trains on.

        Raises:
            TypeError, ValueError: nobody has said that a stream ends, or a rank has no data.
        """
        loader = users_own(loader)
        spec = self.inspect(loader)
        assert isinstance(loader, DataLoader)
        if spec.kind == "stream" and not self._takes_streams:
            raise TypeError(
                "the train dataset is an IterableDataset, and nobody has said when a rank's data end: say"
                " FederatedStrategy(stream='finite') if every rank has its own stream; one that does not end trains up"
                " to limit_train_batches or max_steps"
            )
        if self._bound:  # reloaded: perhaps other data
            self.place = DataPlace(self.place.passes + 1)
        copy = self._own_stream(loader, spec) if spec.kind == "stream" else self._own_order(loader, spec)
        self._bound = [BoundLoader(spec=spec, full=self._full(), order=None, loader=copy)]
        return copy

    def _own_stream(self, loader: DataLoader, spec: LoaderSpec) -> DataLoader:
        assert spec.batch_size is not None
        self.stream = stream = ClientStream(loader, counted=self._counted)
        self._opened(Client(UNCOUNTED, spec.batch_size, UNCOUNTED))

        def batches(iterator: object) -> Iterator[Any] | None:
            return self._epoch(stream.drawn) if compat.is_train_iterator(self._trainer, iterator) else None

        return fed_copy(loader, OwnStreamFeed(stream, batches, partial(compat.fetch_singly, self._trainer)))

    def _own_order(self, loader: DataLoader, spec: LoaderSpec) -> DataLoader:
        self.stream = None
        rank, seed = self._trainer.global_rank, int(os.environ.get("PL_GLOBAL_SEED", 0))
        order = OwnOrder(loader, spec, seed=seed * 1_000_003 + rank)
        mine = Client(order.samples, min(order.batch_size, max(1, order.samples)), order.batches)
        if self._size is not None and order.by_batch:
            raise TypeError(
                "the train loader has a custom batch sampler, which decides the sizes of batches, and the policy"
                " would re-size them: use policy='fedavg' or 'adaptive_steps', or give the loader a batch_size"
            )
        length = self._opened(mine)
        sampler = OwnBatches(order, size=self._size, place=lambda: self.place)

        def batches(iterator: object, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
            if compat.is_train_iterator(self._trainer, iterator):
                return self._epoch(partial(sampler.drawn, own=own))
            sampler.begin(self.place)  # a user's look at the loader, which trains nothing
            return islice(own(), length)

        place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        return fed_copy(loader, OwnFeed(batches, length), in_order=True, **{place: sampler})

    def regroup(self, clients: dict[int, Client]) -> None:
        """Other clients are there."""
        self.clients = clients
        for bound in self._bound:
            bound.full = self._full()

    def _full(self) -> int:
        return sum(client.batch_size for client in self.clients.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns what any engine needs to go on, as plain types."""
        # What the channel has may be fewer ranks than the fit began with.
        return {**super().state_dict(), "world_size": self._trainer.world_size, "orders": [], "applied": {}}

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        # Of its stream another engine tells the samples.
        places = state.get("clients") or [(0, samples) for samples in state.get("used", ())]
        self.placed = len(places) == self._trainer.world_size
        if self.placed:
            self.place = DataPlace(*(int(n) for n in places[self._trainer.global_rank]))
