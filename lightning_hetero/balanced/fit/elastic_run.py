"""A balanced fit whose ranks may be lost and come again (layer L).

    a rank is lost        in the exchange of gradients [lost_ranks], in a validation, where an epoch ends
    one wants to join     rank 0 says so with the gradients; before the next batch all let it in [admission]

Training goes on without a rank that is lost: those that are left train on its samples of the batch.

    own backward pass -> gradients of this rank's part -> exchange [base/elastic/exchange] -> hooks, clipping, update
    a rank is lost    -> its samples are dealt out -> ``training_step`` on them, gradients added -> exchange

Gradients are exchanged in each batch, also within an accumulation window: what a rank has added up would be lost with
it. Batches that loaders have fetched ahead are divided among ranks that are no longer there; their samples are dealt
out in the same way when their turn comes. No hook is called again; what ``training_step`` logs for such samples is not
counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.balanced.fit.loaders import BalancedBinder, BalanceSettings
from lightning_hetero.balanced.fit.recovery import loss_of
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.balanced.runtime.pieces import PieceGradients, cut, least_samples
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.exchange import ElasticExchange
from lightning_hetero.base.elastic.join import Invitation
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.elastic.run_meetings import MeetingPoints, MeetingRun, RunMeetings
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.data.batches import Part
from lightning_hetero.data.copies import altered_copy, users_own
from lightning_hetero.data.loader import sampled_by
from lightning_hetero.data.order import Channel
from lightning_hetero.types import LossReduction


class SurvivingStep:
    """The gradients of one batch after another, of all samples, whoever is lost.

    Args:
        trainer: the running trainer; with automatic optimization.
        members: the ranks that take part.
        exchange: of all of them.
        binder: has the loader.
        reduction: of the loss.
    """

    def __init__(
        self, trainer: Trainer, members: Members, exchange: ElasticExchange, binder: BalancedBinder,
        reduction: LossReduction,
    ) -> None:  # fmt: skip
        self._trainer, self._members, self._exchange, self._binder = trainer, members, exchange, binder
        self._module: LightningModule = trainer.lightning_module
        self._sums = reduction == "sum"
        self._before: list[tuple[nn.Parameter, Tensor]] = []  # gradients of the accumulation window so far

    def begin(self) -> None:
        """This rank's backward pass begins."""
        self._before = [(p, p.grad) for p in self._module.parameters() if p.grad is not None]
        for parameter, _ in self._before:
            parameter.grad = None

    def end(self, part: Part) -> None:
        """It is over: exchanges its gradients.

        Args:
            part: of the batch.

        Raises:
            TypeError: a gradient is sparse.
        """
        trained = [p for p in self._module.parameters() if p.requires_grad]
        if any(p.grad is not None and p.grad.is_sparse for p in trained):
            raise TypeError("min_ranks with sparse gradients (Embedding(sparse=True)): set sparse=False, or drop it")
        buffers = list(self._module.buffers())
        owners = [rank for rank, share in enumerate(part.shares) for _ in range(share)]

        def fill() -> tuple[int, list[Tensor]]:
            self._take_over(part, owners, trained)
            used = torch.tensor([float(p.grad is not None) for p in trained], dtype=torch.float64)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
            # BatchNorm's statistics, e.g., are the lowest rank's, as in any DDP.
            kept = [b.detach() if self._members.is_lowest else torch.zeros_like(b) for b in buffers]
            return owners.count(self._members.rank), [used, *packed(gradients), *packed(kept)]

        place = f"the gradients of epoch {part.epoch}, batch {part.step}"
        used, *sums = self._exchange.exchange(place, fill, sum(part.shares))
        found, kinds = [torch.empty_like(p) for p in trained], len(_kinds(trained))
        unpack_(sums[:kinds], found)
        unpack_(sums[kinds:], buffers)
        for parameter, uses, gradient in zip(trained, used.tolist(), found, strict=True):
            parameter.grad = gradient.div_(self._exchange.world_size) if uses else None
        for parameter, gradient in self._before:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._before = []

    def _take_over(self, part: Part, owners: list[int], trained: Sequence[nn.Parameter]) -> None:
        """Deals out the samples of ranks that are not there, the same way on all, and trains on this one's.

        Args:
            part: of the batch.
            owners: of the samples, in order; changed.
            trained: parameters whose gradients are added to.
        """
        alive, least = self._members.alive, least_samples(self._module)
        left = [i for i, rank in enumerate(owners) if rank not in alive]
        takers = alive[: max(1, min(len(alive), len(left) // least))]
        for n, i in enumerate(left):
            owners[i] = takers[n * len(takers) // len(left)]
        mine = [i for i in left if owners[i] == self._members.rank]
        if not mine:
            return
        trainer, sums = self._trainer, PieceGradients(trained)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        factor = (1.0 if scaler is None else float(scaler.get_scale())) / trainer.accumulate_grad_batches
        for size in cut(len(mine), part.computed, least):
            numbers, mine = mine[:size], mine[size:]
            with compat.unlogged(self._module), trainer.precision_plugin.train_step_context(), torch.enable_grad():
                loss = loss_of(compat.call_training_step(self._module, self._fetched(part, numbers), part.step))
            if loss is None:
                raise RuntimeError(
                    f"training_step has returned no loss for samples of a rank that is lost, in batch {part.step}"
                )
            counts = 1.0 if self._sums else self._exchange.world_size * size / part.weight_base
            sums.add(loss, counts * factor)
        for parameter, gradient in sums.gradients().items():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _fetched(self, part: Part, numbers: Sequence[int]) -> Any:
        """Returns these samples of a global batch, on the device."""
        trainer, bound = self._trainer, self._binder.primary
        assert bound is not None and bound.order is not None
        (indices, ends), loader = bound.sampler.draw(), users_own(bound.loader)
        step = part.step % len(ends)
        chosen = [indices[(ends[step - 1] if step else 0) + i] for i in numbers]
        here = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
        own = sampled_by(loader, [chosen], bound.order)  # pyright: ignore[reportArgumentType]
        found = next(iter(altered_copy(loader, **here, timeout=0, generator=torch.Generator(), **own)))
        batch = tree_map(lambda _: found, trainer.train_dataloader)
        return compat.batch_to_device(trainer, batch, partial(Strategy.batch_to_device, trainer.strategy))


def _kinds(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the tensors' numbers in groups of one device and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return list(groups.values())


def _flat(tensor: Tensor) -> Tensor:
    """Returns a tensor as gloo can sum it."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (real.to(torch.uint8) if real.dtype == torch.bool else real).reshape(-1)


def packed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns new tensors with the numbers of those of one device and dtype one after the other."""
    return [torch.cat([_flat(tensors[i].detach()) for i in group]) for group in _kinds(tensors)]


def unpack_(sums: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Writes what `packed` has made of others like these into them."""
    for flat, group in zip(sums, _kinds(tensors), strict=True):
        parts = flat.split([_flat(tensors[i].detach()).numel() for i in group])
        for i, part in zip(group, parts, strict=True):
            own = tensors[i].detach()
            (torch.view_as_real(own) if own.is_complex() else own).view(-1).copy_(part)


_LIVENESS_S = 30.0  # silence after which a rank is left out; one whose process ends is at once


class ElasticBinder(BalancedBinder):
    """The loader of a fit whose ranks may be lost.

    Attributes:
        joins: of a rank that joins, until it has begun: the others' controller, and who takes part.
    """

    joins: tuple[Mapping[str, Any], tuple[int, ...]] | None = None

    def _settle(self, loaders: Sequence[Any]) -> None:
        """Refuses loaders of which a lost rank's samples could not be dealt out to the others."""
        super()._settle(loaders)
        why = self.equal or ("there are several" if len(loaders) > 1 else None)
        kind = "" if why else self.orders.inspect(loaders[0]).kind
        if kind == "stream":
            why = "its samples have no index, and those of a rank that is lost cannot be read by others"
        elif kind in ("batch_sampler", "distributed_subclass") or not compat.uses_distributed_sampler(self._trainer):
            why = "each rank draws its own samples, and those of a rank that is lost nobody else can"
        if why is not None:
            raise ValueError(f"min_ranks needs one train loader whose samples every rank can read. {why}")

    def bind(self) -> None:
        before = self.controller
        super().bind()
        primary = self._largest()
        if primary.sizes.pieces > 1:
            raise ValueError("min_ranks with max_samples below the global batch: raise max_samples, or lower the batch")
        if self.controller is None or self.controller is before:
            return
        self.controller.bounds, self.controller.exchange = primary.sizes.of_parts(), ExchangeClock(every=1)
        if self.joins is not None:
            self.controller.join(*self.joins)
            self.joins = None


class ElasticBalancedRun(MeetingRun[BalancedBinder], BalancedRun):
    """See the module and `BalancedRun`."""

    loses_ranks = True
    binders = ElasticBinder
    binder: ElasticBinder  # pyright: ignore[reportIncompatibleVariableOverride]
    clients: RunMeetings  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, trainer: Any, strategy: ElasticDDPStrategy[Any], settings: BalanceSettings) -> None:
        self.members = strategy.members
        super().__init__(trainer, strategy, settings)
        reduction = strategy.shared.loss_reduction
        self._step = SurvivingStep(trainer, self.members, self._exchange, self.binder, reduction)

    def invitation(self, strategy: HeteroStrategy[Any]) -> Invitation | None:
        assert isinstance(strategy, ElasticDDPStrategy)
        return strategy.invitation

    def small_channel(self, strategy: HeteroStrategy[Any], settings: BalanceSettings) -> Channel:
        """Ranks exchange what they exchange so that others go on without one.

        Raises:
            ValueError: what this fit trains could not be kept exact then.
        """
        assert isinstance(strategy, ElasticDDPStrategy)
        trainer = self.trainer
        if not self.module.automatic_optimization:
            raise ValueError("min_ranks needs automatic optimization: a step by hand cannot be made again in part")
        if strategy.shared.weight_in(self.module) is not None:
            raise ValueError("min_ranks with batch_weight: what a lost rank's batch counts is lost with it; drop one")
        self.clients = RunMeetings(  # pyright: ignore[reportIncompatibleVariableOverride]
            trainer, strategy, self, least=settings.min_ranks or 1, asked_by="min_ranks", liveness_s=_LIVENESS_S
        )
        self.undo.callback(_MeetingPoints(trainer, self.gather_ranks, lambda: self.present).close)
        rank, world = trainer.global_rank, trainer.world_size
        self._exchange = ElasticExchange(self.clients, self.channel, self.failures, rank=rank, world_size=world)
        return self._exchange

    def backward_begins(self) -> None:
        self._step.begin()

    def backward_is_over(self, part: Part) -> None:
        self._step.end(part)

    def batch_begins(self) -> None:
        """Takes in ranks that have come again, where all gradients are applied."""
        exchange, controller, bound = self._exchange, self.binder.controller, self.binder.primary
        batch = compat.upcoming_batch(self.trainer)
        if not exchange.asked or not batch or batch % self.trainer.accumulate_grad_batches or controller is None:
            return
        exchange.asked = False
        if bound is None or bound.spec.kind == "sampler":
            self.members.warn_once("a rank wants to join, and cannot: the loader has its own sampler, drawn by rank 0")
            return
        controller.drain()
        self.clients.admits = True
        self.clients.admission.look()
        self.clients.admits = False
        self.clients.admission.admit()
        if self.present != controller.present:
            controller.divide_among(self.present)

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        if self.members.joining:
            self.clients.roll.steps, self.binder.joins = state["exchanges"], (state["controller"], self.present)

    def state_dict(self) -> dict[str, Any]:
        state, controller = super().state_dict(), self.binder.controller
        if self.clients.admits and controller is not None:
            state |= {"exchanges": self.clients.roll.steps, "controller": controller.state_dict()}
        return state


class _MeetingPoints(MeetingPoints, Callback):
    """Where the ranks of a run with ``min_ranks`` meet."""
