"""A balanced fit whose ranks may be lost and come again (layer L).

    a rank is lost        in the exchange of gradients [lost_ranks], in a validation, where an epoch ends
    one wants to join     rank 0 says so with the gradients; before the next batch all let it in [admission]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.balanced.fit.loaders import BalancedBinder
from lightning_hetero.balanced.fit.lost_ranks import SurvivingStep
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.balanced.fit.settings import BalanceSettings
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.exchange import ElasticExchange
from lightning_hetero.base.elastic.join import Invitation
from lightning_hetero.base.elastic.run_meetings import MeetingPoints, MeetingRun, RunMeetings
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.data.batches import Part
from lightning_hetero.data.order import Channel

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
