"""Binds the user's train loaders to one controller: sizes, lag, units, and each step's parts (layer L).

Loaders whose batches cannot be divided are left to Lightning, all of a fit's: their batches meet in one loss, whose
weight must be one. Ranks then train in equal parts, on stock DDP's batches with stock DDP's gradients.

The arguments that only the strategies with balanced batches have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.decide.controller import ExchangeClock, ShareController
from lightning_hetero.balanced.decide.quantum import PartSizes, ShapeNeeds
from lightning_hetero.balanced.fit.beforehand import EarlierRuns, found_sizes
from lightning_hetero.balanced.runtime.pieces import least_samples
from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.loaders import BoundLoader, PartBinder
from lightning_hetero.base.orders import check_own_batches, indexed
from lightning_hetero.callbacks.balancing import HeteroBatchSizeFinder
from lightning_hetero.callbacks.reporting import BatchCost
from lightning_hetero.data.batches import Part
from lightning_hetero.data.copies import users_own
from lightning_hetero.data.loader import IndivisibleError, LoaderSpec
from lightning_hetero.data.order import Channel
from lightning_hetero.data.stream import StreamMode, raise_unknown_place
from lightning_hetero.measure.compiles import compiled_parts
from lightning_hetero.measure.device import device_of
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers.scale import scale_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSettings:
    """The strategy's own arguments; see `LoadBalancedStrategy`."""

    policy: BalancePolicy
    rebalance: bool = True
    batch_cost: BatchCost | None = None
    bounds: ShareBounds = field(default_factory=ShareBounds)
    learns: bool = False  # most samples, from the first step on
    quantum: int | Literal["auto"] = "auto"
    stream: StreamMode | None = None
    exchange_every: int | None = None
    min_ranks: int | None = None

    def without_effect(self) -> str:
        """Says which arguments were given and have no effect on equal parts; empty: none."""
        options = {"min_samples": self.bounds.lower, "max_samples": self.bounds.upper}
        options |= {"quantum": None if self.quantum in (1, "auto") else 0}
        idle = [name for name, value in options.items() if value is not None]
        return f". Without effect: {', '.join(idle)}" if idle else ""


@dataclass(eq=False, kw_only=True, slots=True)
class _Balanced(BoundLoader):
    """Besides what every engine knows of a loader.

    Attributes:
        sizes: what the ranks' parts of a full batch may be.
        read_ahead: the ranks' furthest.
        unsized: whether it is a stream without a length.
    """

    sizes: PartSizes
    read_ahead: int = 0
    unsized: bool = False


class BalancedBinder(PartBinder[_Balanced]):
    """Replaces train loaders by re-batched copies and opens their parts step by step.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges at set-up and epoch starts.
        policy: decides shares; started here once the batch sizes are known.
        shared, settings: the strategy's arguments.
        strategy_name: class of the strategy, for messages.
        earlier: what is known of this device from earlier runs.

    Attributes:
        controller: decides with the loaders in use; None before a pass over them has begun.
        equal: why the loaders in use are trained on in equal parts, as by stock DDP; None: they are divided by speed.
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, policy: BalancePolicy, shared: SharedSettings,
        settings: BalanceSettings, *, strategy_name: str, earlier: EarlierRuns,
    ) -> None:  # fmt: skip
        super().__init__(trainer, channel, strategy_name=strategy_name, shared=shared, stream=settings.stream)
        self.settings, self.policy, self.earlier = settings, policy, earlier
        self.controller: ShareController | None = None
        self.equal: str | None = None
        self._asked_batch = shared.global_batch_size
        self.finder: HeteroBatchSizeFinder | None = None  # until it has found
        self._layout: tuple[int, int, int, int] | None = None  # of the running controller: size, quantum, lag, least
        self._announced: Sequence[Any] = ()
        self._several = False
        self._own = False  # whether parts are equal because data belong to their rank
        # By batches of the epoch: the samples of each rank's own stream that so many have used; the latest two.
        self._used: dict[int, list[int]] = {}
        self._least = 1
        self._shapes = ShapeNeeds()
        self._bounds = settings.bounds  # with what compiled code needs

    # ---- set-up -----------------------------------------------------------------------------------------------

    def announce(self, loaders: Sequence[Any]) -> None:
        """Takes the train loaders that will be processed next, all that are trained on at once."""
        self._announced = [users_own(loader) for loader in loaders]

    def process(self, loader: object) -> Any:
        """Returns what the Trainer reads instead of a train loader.

        Raises:
            TypeError, ValueError: the ranks' loaders differ, or an argument does not suit them.
        """
        if self._announced:
            self._several = len(self._announced) > 1
            self._settle(self._announced)
            self._announced = ()
        if self.equal is not None:
            stock: Any = compat.stock_train_loader(self._trainer, users_own(loader))
            inside = compat.batches_trained(self._trainer) and not compat.last_batch_done(self._trainer)
            if inside and "restore" in vars(stock):  # of litData's, which the Trainer never lets come to its end
                raise ValueError(
                    f"the checkpoint was made in the middle of an epoch, and {type(stock).__name__} would begin later"
                    " ones there, as under stock DDP: resume from a checkpoint made at the end of an epoch"
                )
            if self._own:
                check_own_batches(stock, self.equal, self._trainer, self._channel)
            return stock
        loader, spec, read_ahead = self._inspect(loader)
        if spec.kind == "stream" and self.settings.stream is not None:
            return self._stream(loader, spec, self.settings.stream)
        order = self.orders.order(loader, spec, len(self._bound))
        if not self._bound:
            order = self.orders.continued(order)
        sizes = self._sizes_of(spec, order.global_batch_size)
        bound = _Balanced(spec=spec, full=sizes.total, order=order, read_ahead=read_ahead, sizes=sizes)
        self.orders.check_position(order.global_batch_size)
        return self._read_parts(bound, loader, least=sizes.least)

    def _settle(self, loaders: Sequence[Any]) -> None:
        """Finds out, the same on all ranks, whether these loaders are divided by speed, and what BatchNorm needs."""
        module, device = self._trainer.lightning_module, device_of(self._trainer.strategy.root_device)
        compiled = compiled_parts(module, device)
        needs = ShapeNeeds(compiled=compiled.any, per_size=compiled.per_size, tiles=device.tensor_cores())
        mine = self._objection(loaders), least_samples(module), needs, self.earlier.read()
        objections, leasts, everyone, speeds = zip(*self._channel.all_gather_object(mine), strict=True)
        self._least, self._shapes = max(leasts), ShapeNeeds.of_all(everyone)
        self.policy.recall(speeds)
        self._bounds = replace(self.settings.bounds, usual=2 if self._shapes.compiled else 1)
        said, self.equal = self.equal, next((objection for objection in objections if objection), None)
        self._own = self.equal is None and len(loaders) == 1
        if self.equal is None:
            self.equal = self._why_own(indexed(loaders) if self.settings.stream in ("infinite", "finite") else loaders)
        if self.settings.stream == "finite":
            self._check_finite(loaders)
        finder, self.finder = self.finder, None
        if self.equal is None:
            if finder is not None:
                self._find_sizes(finder, loaders)
            return
        self._bound = []
        if finder is not None:
            raise ValueError(f"HeteroBatchSizeFinder needs a train loader whose batches can be divided. {self.equal}")
        if self._asked_batch is not None:
            raise ValueError(
                f"global_batch_size={self._asked_batch} needs a train loader whose batches can be divided. {self.equal}"
            )
        if self.equal != said:
            rank_zero_warn(
                f"{self._strategy_name} trains in equal parts, as its stock strategy does, and cannot make up for slow"
                f" ranks: {self.equal}{self.settings.without_effect()}"
            )

    def _find_sizes(self, finder: HeteroBatchSizeFinder, loaders: Sequence[Any]) -> None:
        """Tries what fits, all ranks equally often, and takes it as if the user had given it."""
        bounds = self.settings.bounds
        if bounds.upper is not None or len(loaders) > 1:
            what = "with several train loaders" if bounds.upper is None else f"with max_samples={bounds.upper!r}"
            raise ValueError(f"HeteroBatchSizeFinder cannot be combined {what}: drop one of them")
        sizes = found_sizes(finder, self._trainer, loaders[0], self._channel)
        if self._asked_batch is None:
            self._asked_batch = sum(sizes)
            self.orders.settle(self._asked_batch)
        self.settings = replace(self.settings, bounds=replace(bounds, upper=list(sizes)))
        self._bounds = replace(self._bounds, upper=list(sizes))
        finder.found(self._trainer, sizes, self._asked_batch)

    def _check_finite(self, loaders: Sequence[object]) -> None:
        why = self.equal or ("there are several" if len(loaders) > 1 else None)
        if why is None and any(isinstance(m, nn.SyncBatchNorm) for m in self._trainer.lightning_module.modules()):
            why = "SyncBatchNorm would count the dummy batches of ranks that are through; use BatchNorm or GroupNorm"
        if why is not None:
            raise ValueError(f"stream='finite' needs one train loader whose batches can be divided. {why}")

    def _objection(self, loaders: Sequence[object]) -> str | None:
        """Returns why one of these loaders' batches cannot be divided, and what would be needed; None: all can be."""
        for loader in loaders:
            try:
                spec = self.orders.inspect(loader)
            except IndivisibleError as error:
                return str(error)
            if spec.kind == "stream" and self.settings.stream is None:
                return (
                    "the train dataset is an IterableDataset, and nobody has said whether ranks share its samples or"
                    " when they end; ranks of unequal numbers of batches then wait without end. Say"
                    f" {self._strategy_name}(stream='finite') if every rank has its own stream and ends when it ends,"
                    " stream='infinite' if every rank's is endless, or stream='shared' if all read the same one (each"
                    " keeps its part of every global batch)"
                )
        return None

    def _sizes_of(self, spec: LoaderSpec, total: int) -> PartSizes:
        """Returns what the parts of a full batch may be, the same on all ranks.

        Raises:
            ValueError: the bounds admit no split, or pieces that manual optimization cannot accumulate.
        """
        world, quantum = self._channel.world_size, self.settings.quantum
        # Where stock DDP's ranks have one sample each, the model can do with one.
        one_each = spec.batch_size in (None, 1) and total <= world
        bounds = replace(self._bounds, least=1 if one_each else self._least)
        sizes = PartSizes.of(total, world, bounds, None if quantum == "auto" else quantum, self._shapes)
        if sizes.pieces > 1 and spec.kind == "stream":
            sizes = replace(sizes, pieces=1)  # refused by `resolve`
        if sizes.pieces > 1:
            room = sum(bounds.caps(world, sizes.quantum))
            said = (
                f"the global batch of {total} samples exceeds max_samples={bounds.upper!r} on {world} ranks"
                f" ({room} together)"
            )
            if not self._trainer.lightning_module.automatic_optimization:
                raise ValueError(f"{said} and manual optimization cannot accumulate it for you; lower the batch")
            rank_zero_info(f"{said}: each rank computes its part in up to {sizes.pieces} pieces, within one batch")
        if not self._several:  # of several loaders the largest's say it, see `bind`
            sizes.resolve()
        return sizes

    def _stream(self, loader: DataLoader, spec: LoaderSpec, mode: StreamMode) -> DataLoader:
        sizes = self._sizes_of(spec, self.orders.batch_of_all(spec))
        finite, done = mode == "finite", compat.batches_trained(self._trainer)
        if len(used := self.orders.resume.get("used", ())) == self._channel.world_size:
            self._used = {done: used}
        elif mode == "infinite" and done and not compat.last_batch_done(self._trainer):
            said = "an infinite stream cannot be repositioned on other ranks: the resumed run reads it from its start"
            if hasattr(loader, "load_state_dict"):
                raise ValueError(f"{said}. If that does not matter, pass torch.utils.data.DataLoader, without a state")
            rank_zero_warn(said)
        bound = _Balanced(
            spec=spec, full=sizes.total, order=None, read_ahead=int(finite),  # see `RebatchedStream`
            unsized=finite or not hasattr(loader.dataset, "__len__"), sizes=sizes,
        )  # fmt: skip
        return self._read_stream(bound, loader, mode, least=sizes.least)

    # ---- running ----------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Starts the controller for the loaders in use: their sizes in common units and the furthest read-ahead."""
        if len(self._bound) > 1 and self._asked_batch is not None:
            raise ValueError(
                f"global_batch_size={self._asked_batch} is ambiguous with {len(self._bound)} train"
                " loaders; set each loader's batch_size instead"
            )
        if len(self._bound) > 1 and any(b.sizes.pieces > 1 for b in self._bound):
            raise ValueError("max_samples below the global batch cannot be combined with several train loaders")
        primary = self._largest()
        unit = math.gcd(*(b.full for b in self._bound))
        quantum = math.lcm(primary.full // unit, primary.sizes.quantum)
        # Without a length Lightning fetches one batch of each loader ahead, to know which is the last.
        lag = max(b.read_ahead for b in self._bound) + any(b.unsized for b in self._bound)
        # In units, so that every loader's part of a batch has its least.
        least = max(-(-b.sizes.least * unit // b.full) for b in self._bound) * (primary.full // unit)
        layout = (primary.full, quantum, lag, least)
        if self.controller is not None and layout == self._layout:
            return
        if primary.full % quantum:
            raise ValueError(
                f"quantum={quantum} does not divide the batch of {primary.full} samples; choose a divisor, or a"
                " global batch that is a multiple of it"
            )
        rank, world = self._channel.rank, self._channel.world_size
        bounds = primary.sizes.of_parts(least)
        self.policy.start(world_size=world, total=primary.full, bounds=bounds, quantum=quantum)
        exchange = ExchangeClock(every=self.settings.exchange_every)
        self.controller = ShareController(self.policy, rank=rank, world_size=world, lag=lag, exchange=exchange)
        self._layout = layout
        if self.settings.quantum == "auto" and primary.sizes.quantum > 1:
            rank_zero_info(
                f"shares are multiples of {primary.sizes.quantum} samples: {self._shapes.why}."
                f" {self._strategy_name}(quantum=1) lets them be any"
            )

    @property
    def pieces(self) -> int:
        """In which a rank computes its part of a full batch at most; 1: at once."""
        return self._bound[0].sizes.pieces if self._bound else 1

    def piece_sizes(self, part: Part) -> list[int]:
        """Returns the samples of the pieces in which this rank computes its part; one: at once."""
        return self._bound[0].sizes.pieces_of(part.shares, part.computed)

    def _largest(self) -> _Balanced:
        """The loader the shares are decided for: the largest global batch."""
        return max(self._bound, key=lambda b: b.full)

    @property
    def primary(self) -> _Balanced | None:
        return self._largest() if self._bound else None

    def split(self, bound: _Balanced, epoch: int, step: int, total: int) -> tuple[int, ...]:
        controller = self.controller
        assert controller is not None
        if step > compat.batches_trained(self._trainer) + controller.lag:
            # A user's look further ahead than there are records: decides nothing.
            shares, most = self.policy.shares, self.policy.limits.upper
        else:
            shares, most = controller.full_shares(epoch, step), controller.most(epoch, step)
        assert self._layout is not None
        full, unit, _, least = self._layout
        if least > unit:  # a policy of the user's may know nothing of it
            units = scale_shares([s // unit for s in shares], full // unit, least=-(-least // unit))
            shares = tuple(s * unit for s in units)
        if total == bound.full:  # the same fraction of every loader: exact, because shares are whole units
            return tuple(s * bound.full // full for s in shares)
        upper = [u * bound.full // full for u in most]
        return scale_shares(shares, total, upper=upper, least=bound.sizes.least)

    def used(self, bound: _Balanced, batches: int) -> int:
        by_rank = self._used.get(batches, [0] * self._channel.world_size)
        return super().used(bound, batches) if self.settings.stream == "shared" else by_rank[self._channel.rank]

    def short(self, part: Part) -> Sequence[bool]:
        """Returns which ranks had fewer samples than their share, since their finite streams end; empty: none can."""
        if self.settings.stream != "finite" or self.controller is None:
            return ()
        shares = self.controller.full_shares(part.epoch, part.step)
        return [n < share for n, share in zip(part.shares, shares, strict=True)]

    def open(self, step: int) -> Part:
        """Returns this rank's part of batch ``step``; of several loaders the primary's, fetch times added up."""
        if len(self._bound) == 1:
            part = super().open(step)
            if (mode := self.settings.stream) in ("finite", "infinite"):
                before = self._used.get(step) if step else [0] * len(part.shares)
                if before is None and mode == "finite":
                    raise_unknown_place(step)
                taken = part.shares if mode == "finite" else [n or part.dummy for n in part.shares]
                self._used = {} if before is None else {step: before, step + 1: [*map(int.__add__, before, taken)]}
            return part
        taken = [(bound, bound.handed.take(step)) for bound in self._bound]
        if not (parts := {id(bound): part for bound, part in taken if part is not None}):
            return super().open(step)  # raises
        chosen = parts.get(id(self._largest()), next(iter(parts.values())))
        self.count(sum(chosen.shares))
        if len({p.samples / p.weight_base for p in parts.values()}) > 1:
            rank_zero_warn(
                "the last batches of the train loaders are divided differently among the ranks, so their common loss is"
                " weighted by the largest loader's share; use drop_last=True to stay exact"
            )
        return replace(chosen, fetch_s=math.fsum(p.fetch_s for p in parts.values()))

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        if policy := state.get("policy"):
            self.policy.load_state_dict(policy)
            known = policy.get("most_samples", ())
            if len(known) == self._channel.world_size:
                self.earlier.most = known[self._channel.rank]

    def keep_speed(self) -> None:
        """Keeps what the policy has learned of this rank for later runs."""
        self.earlier.write(self.policy.learned(self._channel.rank))

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types; nothing of equal parts, for which stock DDP keeps all."""
        used = self._used.get(compat.batches_trained(self._trainer))
        more = {"policy": self.policy.state_dict(), **({"used": used} if used else {})}
        return {} if self.equal is not None else {**super().state_dict(), **more}
