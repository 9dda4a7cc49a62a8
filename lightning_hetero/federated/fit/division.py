"""What the ranks train on that are there, and what the policy divides among them (layer L)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero.base.elastic.members import Members
from lightning_hetero.federated.decide.rounds import Client, RoundPlan, spread
from lightning_hetero.federated.fit.loaders import OwnBinder
from lightning_hetero.federated.fit.settings import FederatedSettings

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Division:
    """Opens the policy for the ranks that are there, and again when ranks are lost or come.

    Args:
        trainer: the running trainer.
        settings: of the fit; its policy divides.
        binder: keeps what the ranks that are there train on.
        members: the ranks that are there.

    Attributes:
        ranks: among which the policy divides, ascending; empty before it does.
        mine: what this rank trains on.
        why: other ranks are there than before.
        joined: whether this rank has just come, with the round that begins.
    """

    def __init__(self, trainer: Trainer, settings: FederatedSettings, binder: OwnBinder, members: Members) -> None:
        self.ranks: tuple[int, ...] = ()
        self.mine = Client(0, 0, 0)
        self.why = ""
        self.joined = False
        self._trainer, self._settings, self._binder, self._members = trainer, settings, binder, members
        self._policy = settings.policy
        self._known: dict[int, Client] = {}  # what each rank trains on, also one that is lost
        self._new: set[int] = set()  # ranks of which that is still to be told

    @property
    def plan(self) -> RoundPlan:
        """The plan of the round that runs, by place among `ranks`."""
        return self._policy.plan

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of a local step's batch of each rank that there was at first; 0 of one that is not there."""
        return spread(self.plan.sizes, self.ranks, self._trainer.world_size)

    @property
    def steps(self) -> tuple[int, ...]:
        """Local steps of each rank that there was at first; 0 of one that is not there."""
        return spread(self.plan.steps, self.ranks, self._trainer.world_size)

    def heard(self, everyone: Sequence[Client]) -> None:
        """Takes what each rank that is there trains on."""
        self._known |= dict(zip(self._members.alive, everyone, strict=True))
        self._new.clear()
        self._regroup()

    def _regroup(self) -> None:
        self._binder.regroup([self._known[rank] for rank in self._members.alive])

    def others(self, before: Collection[int], now: Collection[int]) -> bool:
        """Other ranks are there; returns whether the policy can divide among them, as it is known what they have."""
        self._new = (self._new | set(now) - set(before)) & set(now)
        return bool(self.ranks) and not self._new

    @property
    def outdated(self) -> bool:
        """Whether it has to be told what a rank trains on, or divided among others."""
        return bool(self._new) or self.ranks != self._members.alive

    def open(self) -> None:
        """Divides among the ranks that are there.

        Raises:
            ValueError: the bounds admit no batches.
        """
        settings, present = self._settings, self._members.alive

        def of_those(given: Any) -> Any:
            """Bounds that the user has given per rank."""
            listed = isinstance(given, Sequence) and len(given) == self._trainer.world_size
            return [given[rank] for rank in present] if listed else given

        layers = self._trainer.lightning_module.modules()
        self._policy.start(
            self._binder.clients,
            local_steps=settings.local_steps,
            lower=of_those(settings.min_samples),
            upper=of_those(settings.max_samples),
            total=self._binder.asked_batch,
            least=2 if any(isinstance(layer, _BatchNorm) for layer in layers) else 1,
        )
        self.ranks = present

    def again(self, chosen: Collection[int]) -> frozenset[int]:
        """Divides among others than before, in the middle of a run.

        Args:
            chosen: places of the ranks that take part in the round.

        Returns:
            Their places now.
        """
        old, now = self.ranks, self._members.alive
        self._regroup()
        self._policy.keep([old.index(rank) if rank in old else None for rank in now])
        self.open()
        return frozenset(i for i, rank in enumerate(now) if rank in old and old.index(rank) in chosen)
