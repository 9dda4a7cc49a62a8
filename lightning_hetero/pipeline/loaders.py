"""Binds the user's train loader to the plan: the leader of each group reads the group's part (layer L).

    global batch t:   [ group 0          | group 1    ]     samples as planned, scaled where a batch is shorter
                      [ 0 | 1 | 2 | 3    | 4 | 5 | 6  ]     micro-batches, numbered across the groups

Ranks that lead no group read one sample, a dummy, so that Lightning's loop has a batch on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_hetero.data import (
    Channel,
    EpochOrder,
    GlobalBatchSampler,
    LoaderSpec,
    Part,
    inspect_loader,
)
from lightning_hetero.data.batches import HandedParts
from lightning_hetero.glue.orders import OrderFinder
from lightning_hetero.glue.parts import in_use, loader_of_parts, stream_of_parts
from lightning_hetero.pipeline.plans import evened
from lightning_hetero.solvers.apportion import scale_shares
from lightning_hetero.types import PipelinePlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["PipelineBinder"]

_SEVERAL = (
    "A pipeline cuts one batch into micro-batches, and batches of several loaders have several sizes: pass one"
    " DataLoader. Combine the datasets (torch.utils.data.StackDataset or ConcatDataset), or use"
    " strategy='hetero_balanced'"
)


@dataclass(eq=False, slots=True)
class _Slot:
    """One train loader: its full batch in samples, its order, and the parts it has handed out."""

    spec: LoaderSpec
    full: int
    order: EpochOrder | None
    handed: HandedParts = field(default_factory=HandedParts)
    loader: Any = None


class PipelineBinder:
    """Replaces the train loader by a re-batched copy, and knows the parts of each batch on all ranks.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges at set-up and epoch starts; over all ranks, those that rest too.
        global_batch_size: samples of all ranks per batch; None: the loader's ``batch_size`` x devices.
        stream: ``"shared"``: all ranks read the same `IterableDataset`; None: one is refused.
        batch_sampler: what to do with a custom batch sampler.
        strategy_name: class of the strategy, for messages.

    Attributes:
        orders: finds the loader's order; its ``resume`` is set before the loader is processed.
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: Channel,
        *,
        global_batch_size: int | None = None,
        stream: Literal["shared"] | None = None,
        batch_sampler: Literal["refuse", "pool"] = "refuse",
        strategy_name: str = "HeteroPipelineStrategy",
    ) -> None:
        self.orders = OrderFinder(
            trainer,
            channel,
            strategy_name=strategy_name,
            global_batch_size=global_batch_size,
            batch_sampler=batch_sampler,
            stream=stream,
        )
        self._trainer = trainer
        self._channel = channel
        self._stream_mode = stream
        self._strategy_name = strategy_name
        self._slots: list[_Slot] = []
        self._stale = True  # loaders were (re)loaded since they were last compared with the Trainer's
        self._plan: PipelinePlan | None = None

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def global_batch_of(self, loader: DataLoader | LoaderSpec) -> int:
        """Returns the samples of a full global batch of a train loader, before it is processed; a collective.

        Args:
            loader: the user's, or what `inspect_loader` says of it; a loader with a batch sampler must be given itself.

        Raises:
            TypeError, ValueError: as `process`.
        """
        if isinstance(loader, Mapping | Sequence | CombinedLoader):
            raise TypeError(f"the train loader is a {type(loader).__name__} of loaders. {_SEVERAL}")
        spec = loader if isinstance(loader, LoaderSpec) else inspect_loader(loader)
        self.orders.agree(spec)
        if spec.kind == "stream":
            self._require_stream()
        if spec.batch_size is not None:
            return self.orders.batch_of_all(spec)
        if isinstance(loader, LoaderSpec):
            raise TypeError("a batch sampler decides the size of its batches: pass the loader, not its LoaderSpec")
        return self.orders.order(loader, spec, 0).global_batch_size

    def settle(self, plan: PipelinePlan) -> None:
        """Takes the plan that holds for all batches drawn from now on; the same on all ranks.

        Raises:
            ValueError: a plan without groups.
        """
        if not plan.groups:
            raise ValueError(f"a plan without groups trains nothing: {plan.reason or 'it is empty'}")
        self._plan = plan

    @property
    def plan(self) -> PipelinePlan:
        """The plan in force."""
        if self._plan is None:
            raise RuntimeError("a train batch was drawn before there was a plan; this is a bug of lightning_hetero")
        return self._plan

    def process(self, loader: object) -> DataLoader:
        """Returns the re-batched copy of the train loader.

        Raises:
            TypeError, ValueError: the loader cannot be divided, or the ranks' loaders differ.
        """
        spec = inspect_loader(loader)
        assert isinstance(loader, DataLoader)
        self.orders.agree(spec)
        slot = self._stream(loader, spec) if spec.kind == "stream" else self._mapped(loader, spec)
        self._slots.append(slot)
        self._stale = True
        return slot.loader

    def _mapped(self, loader: DataLoader, spec: LoaderSpec) -> _Slot:
        order = self.orders.continued(self.orders.order(loader, spec, 0))
        self.orders.check_position(order.global_batch_size)
        slot = _Slot(spec=spec, full=order.global_batch_size, order=order)
        sampler = GlobalBatchSampler(order, split=self._split_of(slot), rank=self._channel.rank)
        slot.loader = loader_of_parts(self._trainer, loader, sampler, slot.handed)
        return slot

    def _require_stream(self) -> None:
        if self._stream_mode is None:
            raise TypeError(
                "the train dataset is an IterableDataset, and every rank of a pipeline would read a stream of its own."
                f" Say {self._strategy_name}(stream='shared') if all ranks read the same stream (each group keeps its"
                " part of every global batch); otherwise use a map-style dataset, or strategy='ddp'"
            )

    def _stream(self, loader: DataLoader, spec: LoaderSpec) -> _Slot:
        self._require_stream()
        slot = _Slot(spec=spec, full=self.orders.batch_of_all(spec), order=None)
        slot.loader = stream_of_parts(
            self._trainer,
            loader,
            self._channel,
            mode="shared",
            global_batch_size=slot.full,
            split=self._split_of(slot),
            handed=slot.handed,
        )
        return slot

    # ---- running ---------------------------------------------------------------------------------------------------

    def _split_of(self, slot: _Slot) -> Callable[[int, int, int], tuple[int, ...]]:
        def split(epoch: int, step: int, total: int) -> tuple[int, ...]:
            self._current()
            groups = self.plan.groups
            planned = [group.samples for group in groups]
            if sum(planned) != slot.full:
                raise ValueError(
                    f"the plan divides {sum(planned)} samples, but the train loader's global batch has {slot.full}:"
                    " plan for that, or set global_batch_size"
                )
            shares = [0] * self._channel.world_size
            for group, share in zip(groups, scale_shares(planned, total, lower=1), strict=True):
                shares[group.ranks[0]] = share
            return tuple(shares)

        return split

    def _current(self) -> _Slot:
        """The one train loader in use; loaders that were replaced by reloading are forgotten.

        Raises:
            TypeError: there are several.
        """
        if self._stale:
            self._slots = in_use(self._trainer, self._slots)
            self._stale = False
        if len(self._slots) > 1:
            raise TypeError(f"several train loaders. {_SEVERAL}")
        return self._slots[0]

    def open(self, step: int) -> Part:
        """Returns this rank's part of batch ``step``, once the loader has handed it out."""
        part = self._current().handed.take(step)
        if part is None:
            raise RuntimeError(f"no part is known for training batch {step}; this is a bug of lightning_hetero")
        return part

    def micro_batches(self, part: Part, group: int | None) -> tuple[tuple[int, ...], int]:
        """Returns the samples of each micro-batch of a group, and the number of the first in the global batch.

        Numbers follow the samples: the groups in the order of their leaders' ranks. The same on all ranks.

        Args:
            part: any rank's part of the batch.
            group: index of the group in the plan; None for a rank at rest, which has none.
        """
        if group is None:
            return (), 0
        groups = self.plan.groups
        sizes = [micro_sizes(g.micro_batches, part.shares[g.ranks[0]]) for g in groups]
        before = [s for g, s in zip(groups, sizes, strict=True) if g.ranks[0] < groups[group].ranks[0]]
        return sizes[group], sum(map(len, before))

    @property
    def global_batch_size(self) -> int | None:
        """Samples of all groups per batch of the loader; None before it is known."""
        return self._slots[-1].full if self._slots else None

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types."""
        slot = self._slots[-1] if self._slots else None
        return {
            "world_size": self._channel.world_size,
            "global_batch_size": self.global_batch_size,
            "batch_size": slot.spec.batch_size if slot is not None else None,
            "orders": [slot.order.state_dict() if slot.order is not None else {}] if slot is not None else [],
            "applied": self.orders.applied(slot.order if slot is not None else None),
        }


def micro_sizes(planned: Sequence[int], samples: int) -> tuple[int, ...]:
    """Returns the micro-batches of a part of a batch: as planned as far as there are samples, the rest as one.

    Of a part larger than planned (global batches of a user's batch sampler may be), the rest is cut into micro-batches
    of at most the largest that was planned for, since that is known to fit; and no single sample is left, see `evened`.

    >>> micro_sizes((4, 4, 4, 3), 15), micro_sizes((4, 4, 4, 3), 9), micro_sizes((4, 4), 14)
    ((4, 4, 4, 3), (4, 3, 2), (4, 4, 4, 2))
    """
    sizes: list[int] = []
    for size in chain(planned, repeat(max(planned))):
        if samples <= 0:
            break
        sizes.append(min(size, samples))
        samples -= size
    return tuple(sizes) if len(sizes) == len(planned) and sum(sizes) == sum(planned) else evened(sizes)
