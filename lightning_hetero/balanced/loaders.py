"""Binds the user's train loaders to one controller: sizes, lag, units, and each step's parts (layer L)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.controller import Controller, ExchangeClock
from lightning_hetero.balanced.policy import BalancePolicy, ShareBounds
from lightning_hetero.data import (
    EpochOrder,
    GlobalBatchSampler,
    LoaderSpec,
    Part,
    inspect_loader,
)
from lightning_hetero.data.batches import HandedParts, micro_batch_size
from lightning_hetero.data.stream import StreamMode
from lightning_hetero.glue.orders import OrderFinder
from lightning_hetero.glue.parts import in_use, loader_of_parts, stream_of_parts
from lightning_hetero.solvers.apportion import scale_shares
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["BatchSettings", "LoaderBinder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The strategy's arguments that concern batches; see `LoadBalancedStrategy`."""

    global_batch_size: int | None = None
    bounds: ShareBounds = field(default_factory=ShareBounds)
    quantum: int = 1
    stream: StreamMode | None = None
    batch_sampler: Literal["refuse", "pool"] = "refuse"
    exchange_every: int | None = None


@dataclass(eq=False, slots=True)
class _Slot:
    """One train loader: its full (micro-)batch in samples, what it has handed out, and its order."""

    spec: LoaderSpec
    full: int
    order: EpochOrder | None
    read_ahead: int = 0
    unsized: bool = False
    handed: HandedParts = field(default_factory=HandedParts)
    loader: Any = None
    micro_batches: int = 1


class LoaderBinder:
    """Replaces train loaders by re-batched copies and opens their parts step by step.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges at set-up and epoch starts.
        policy: decides shares; started here once the batch sizes are known.
        settings: see `BatchSettings`.

    Attributes:
        orders: finds each loader's order; its ``resume`` is set before the loaders are processed.
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: SideChannel,
        policy: BalancePolicy,
        settings: BatchSettings,
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.controller: Controller | None = None
        self._trainer = trainer
        self._channel = channel
        self.orders = OrderFinder(
            trainer,
            channel,
            strategy_name="LoadBalancedStrategy",
            global_batch_size=settings.global_batch_size,
            batch_sampler=settings.batch_sampler,
            stream=settings.stream,
        )
        self._slots: list[_Slot] = []
        self._layout: tuple[int, int, int] | None = None  # of the running controller: size, quantum, lag
        self._stale = True  # loaders were (re)loaded since the controller was bound to them
        self._user_accumulation = trainer.accumulate_grad_batches

    # ---- set-up -----------------------------------------------------------------------------------------------

    def process(self, loader: object) -> DataLoader:
        """Returns the re-batched copy of one train loader.

        Raises:
            TypeError, ValueError: the loader cannot be divided, or the ranks' loaders differ.
        """
        spec = inspect_loader(loader)
        assert isinstance(loader, DataLoader)
        read_ahead = self.orders.agree(spec)
        self._stale = True
        if spec.kind == "stream":
            return self._stream(loader, spec)
        order = self.orders.order(loader, spec, len(self._slots))
        if not self._slots:
            order = self.orders.continued(order)
        micro = self._micro_batches(order.global_batch_size)
        quantum = self.settings.quantum
        full = micro_batch_size(order.global_batch_size, micro, quantum)
        slot = _Slot(spec=spec, full=full, order=order, read_ahead=read_ahead, micro_batches=micro)
        self.settings.bounds.resolve(self._channel.world_size, full, quantum)
        self.orders.check_position(order.global_batch_size)
        sampler = GlobalBatchSampler(
            order, split=self._split_of(slot), rank=self._channel.rank, micro_batches=micro, quantum=quantum
        )
        slot.loader = loader_of_parts(self._trainer, loader, sampler, slot.handed)
        self._slots.append(slot)
        return slot.loader

    def _stream(self, loader: DataLoader, spec: LoaderSpec) -> DataLoader:
        if self.settings.stream is None:
            raise TypeError(
                "the train dataset is an IterableDataset. Finite streams of their own per rank cannot be balanced: the"
                " fast ranks would run dry first and gain nothing. Say LoadBalancedStrategy(stream='infinite') if"
                " every rank's stream is endless, or stream='shared' if all ranks read the same stream (each keeps its"
                " part of every global batch). Otherwise use strategy='ddp'"
            )
        total = self.orders.batch_of_all(spec)
        self.settings.bounds.resolve(self._channel.world_size, total, self.settings.quantum)
        sized = hasattr(loader.dataset, "__len__")
        slot = _Slot(spec=spec, full=total, order=None, unsized=not sized)
        if self.settings.stream == "infinite" and compat.batches_trained(self._trainer):
            rank_zero_warn("an infinite stream cannot be repositioned: the resumed run reads it from its start")

        slot.loader = stream_of_parts(
            self._trainer,
            loader,
            self._channel,
            mode=self.settings.stream,
            global_batch_size=total,
            split=self._split_of(slot),
            handed=slot.handed,
        )
        self._slots.append(slot)
        return slot.loader

    def _micro_batches(self, total: int) -> int:
        """Number of accumulated micro-batches if the ranks' ``max_samples`` do not hold the global batch at once."""
        upper = self.settings.bounds.upper
        if upper is None:
            return 1
        world = self._channel.world_size
        caps = [upper] * world if isinstance(upper, int) else list(upper)
        room = sum(cap // self.settings.quantum * self.settings.quantum for cap in caps)
        if room >= total:
            return 1
        if room <= 0:
            raise ValueError(f"max_samples={upper!r} leaves no room for any sample; raise it")
        micro = -(-total // room)
        if not self._trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"the global batch of {total} samples exceeds max_samples={upper!r} on {world} ranks ({room} together)"
                " and manual optimization cannot accumulate it for you; lower the batch or accumulate in training_step"
            )
        self._trainer.accumulate_grad_batches = self._user_accumulation * micro
        size = micro_batch_size(total, micro, self.settings.quantum)
        rank_zero_info(
            f"global batch of {total} samples does not fit max_samples={upper!r} on {world} ranks at once:"
            f" accumulating it over {micro} batches of {size} (accumulate_grad_batches ="
            f" {self._trainer.accumulate_grad_batches}); the update still sees {total} samples"
        )
        return micro

    # ---- running ----------------------------------------------------------------------------------------------

    def _bind(self) -> Controller:
        """Starts the controller for the loaders in use: their sizes in common units and the furthest read-ahead."""
        if not self._stale and self.controller is not None:
            return self.controller
        self._slots = in_use(self._trainer, self._slots)
        if len(self._slots) > 1 and self.settings.global_batch_size is not None:
            raise ValueError(
                f"global_batch_size={self.settings.global_batch_size} is ambiguous with {len(self._slots)} train"
                " loaders; set each loader's batch_size instead"
            )
        if len(self._slots) > 1 and any(s.micro_batches > 1 for s in self._slots):
            raise ValueError("max_samples below the global batch cannot be combined with several train loaders")
        primary = self._primary()
        unit = math.gcd(*(s.full for s in self._slots))
        quantum = math.lcm(primary.full // unit, self.settings.quantum)
        # Without a length Lightning fetches one batch of each loader ahead, to know which is the last.
        lag = max(s.read_ahead for s in self._slots) + any(s.unsized for s in self._slots)
        layout = (primary.full, quantum, lag)
        if self.controller is None or layout != self._layout:
            if primary.full % quantum:
                raise ValueError(
                    f"quantum={quantum} does not divide the batch of {primary.full} samples; choose a divisor, or a"
                    " global batch that is a multiple of it"
                )
            world = self._channel.world_size
            self.policy.start(
                world_size=world, total=primary.full, bounds=self.settings.bounds, quantum=quantum
            )
            self.controller = Controller(
                self.policy,
                rank=self._channel.rank,
                world_size=world,
                lag=lag,
                exchange=ExchangeClock(every=self.settings.exchange_every),
            )
        self._layout, self._stale = layout, False
        return self.controller

    def _primary(self) -> _Slot:
        """The loader the shares are decided for: the largest global batch."""
        return max(self._slots, key=lambda s: s.full)

    def _split_of(self, slot: _Slot) -> Callable[[int, int, int], tuple[int, ...]]:
        def split(epoch: int, step: int, total: int) -> tuple[int, ...]:
            controller = self._bind()
            if step > compat.batches_trained(self._trainer) + controller.lag:
                shares = self.policy.shares  # a user's look further ahead than there are records: decides nothing
            else:
                shares = controller.full_shares(epoch, step)
            if total == slot.full:  # the same fraction of every loader: exact, because shares are whole units
                full = sum(shares)
                if full == total:
                    return shares
                return tuple(s * slot.full // full for s in shares)
            return scale_shares(shares, total)

        return split

    def open(self, step: int) -> Part:
        """Returns this rank's part of batch ``step``; of several loaders the primary's, fetch times added up."""
        parts: dict[int, Part] = {}
        for i, slot in enumerate(self._slots):
            if (part := slot.handed.take(step)) is not None:
                parts[i] = part
        if not parts:
            raise RuntimeError(f"no part is known for training batch {step}; this is a bug of lightning_hetero")
        if len(self._slots) == 1:
            return parts[0]
        chosen = parts.get(self._slots.index(self._primary()), next(iter(parts.values())))
        if len({p.samples / p.weight_base for p in parts.values()}) > 1:
            rank_zero_warn(
                "the last batches of the train loaders do not divide among the ranks alike, so their common loss is"
                " weighted by the largest loader's share; use drop_last=True to stay exact"
            )
        return replace(chosen, fetch_s=math.fsum(p.fetch_s for p in parts.values()))

    @property
    def global_batch_size(self) -> int | None:
        """Samples of all ranks per batch of the loader, before any accumulation asked for by the user."""
        if not self._slots:
            return None
        slot = self._primary()
        return slot.order.global_batch_size if slot.order is not None else slot.full

    @property
    def user_accumulation(self) -> int:
        """The user's own ``accumulate_grad_batches``."""
        return self._user_accumulation

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types."""
        primary = self._primary() if self._slots else None
        return {
            "world_size": self._channel.world_size,
            "global_batch_size": self.global_batch_size,
            "batch_size": primary.spec.batch_size if primary else None,
            "orders": [s.order.state_dict() if s.order else {} for s in self._slots],
            "applied": self.orders.applied(self._slots[0].order if self._slots else None),
            "policy": self.policy.state_dict(),
        }

    def restore_trainer(self) -> None:
        """Gives the Trainer back its own accumulation setting."""
        self._trainer.accumulate_grad_batches = self._user_accumulation
