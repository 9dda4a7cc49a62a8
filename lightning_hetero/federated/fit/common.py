"""What the ranks have in common when they have met: parameters, buffers, optimizer states (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.federated.decide.rounds import ClientRow, digest_of
from lightning_hetero.federated.fit.settings import FederatedSettings
from lightning_hetero.federated.runtime.averaging import average_
from lightning_hetero.federated.runtime.proximal import add_proximal_
from lightning_hetero.federated.runtime.states import (
    Kept,
    average_states_,
    complete,
    copied_states,
    forget_states,
    kept_states,
    restore_states,
)
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["CommonState"]


class CommonState:
    """Averages what this rank has trained with what the others have.

    Args:
        trainer: the running trainer.
        settings: of the fit.
        channel: small collectives of all ranks.
    """

    def __init__(self, trainer: Trainer, settings: FederatedSettings, channel: SideChannel) -> None:
        self._trainer, self._settings, self._channel = trainer, settings, channel
        self._trainable: set[int] = set()  # parameters that were trained when the ranks met, by id
        self._before: dict[int, Tensor] = {}  # the last average, by id of the parameter
        if settings.server is not None:
            settings.server.forget()

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self._trainer.strategy.optimizers

    def _parameters(self) -> list[nn.Parameter]:
        """What is trained, or was when the ranks met: also what was frozen since."""
        parameters = self._trainer.lightning_module.parameters()
        return [p for p in parameters if p.requires_grad or id(p) in self._trainable]

    def tensors(self) -> list[Tensor]:
        """Returns what is averaged: trained parameters, what the module saves besides, and averaged weights."""
        buffers = [
            buffer
            for layer in self._trainer.lightning_module.modules()
            for name, buffer in layer.named_buffers(recurse=False)
            if name not in layer._non_persistent_buffers_set
        ]
        unique = {id(t): t for t in (*self._parameters(), *buffers, *compat.averaged_weights(self._trainer))}
        return list(unique.values())

    def states_digest(self) -> float:
        """Returns a digest of what the optimizers keep; the same for all where it is not averaged.

        Raises:
            TypeError: an optimizer keeps what has no average.
        """
        averaged = self._settings.optimizer_state == "average"
        return digest_of(kept_states(self._optimizers) if averaged else [])

    def average(self, tensors: Sequence[Tensor], rows: Sequence[ClientRow]) -> None:
        """Replaces all by the ranks' average, weighted as their rows say; a collective. Without weights nothing."""
        total = sum(row.weight for row in rows)
        if not total > 0:
            return
        # Over the side channel where a rank may be lost in it: on gloo that is an error, and soon.
        group = self._channel.group if self._settings.min_clients is not None else dist.group.WORLD
        part = rows[self._channel.rank].weight / total
        assert group is not None
        average_(tensors, part, group)
        if self._settings.optimizer_state == "average":
            if len({row.states for row in rows}) > 1:
                everyone = self._channel.all_gather_object([tuple(kept) for kept in kept_states(self._optimizers)])
                complete(self._optimizers, sorted({Kept(*kept) for states in everyone for kept in states}))
            average_states_(
                self._optimizers,
                lambda states: average_(states, part, group),
                lambda numbers: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._channel.group),
            )

    def take(self, rows: Sequence[ClientRow]) -> None:
        """All ranks hold the average of these rows: the server's step from it, alike on all."""
        if not sum(row.weight for row in rows) > 0:
            return
        server, trained = self._settings.server, self._parameters()
        if server is not None:
            server.step([self._before.get(id(p), p.detach()) for p in trained], [p.detach() for p in trained])
        if self._settings.optimizer_state == "reset":
            forget_states(self._optimizers)

    def copied(self) -> Callable[[], None]:
        """Copies what an average changes; returns what brings it back."""
        tensors, optimizers = self.tensors(), self._optimizers
        copies = [tensor.detach().clone() for tensor in tensors]
        states = copied_states(optimizers) if self._settings.optimizer_state == "average" else None

        def bring_back() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.detach().copy_(copy)
            if states is not None:
                restore_states(optimizers, states)

        return bring_back

    def remember(self) -> None:
        """Takes what there is now for the last average."""
        trained = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]
        self._trainable = {id(p) for p in trained}
        if self._settings.server is not None or self._settings.proximal:
            self._before = {id(p): p.detach().clone() for p in trained}

    def pull(self) -> None:
        """Adds FedProx's term to the gradients of a local step, scaled as they are."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        mu = self._settings.proximal * (scaler.get_scale() if scaler else 1.0)
        trained = [p for p in self._trainer.lightning_module.parameters() if id(p) in self._before]
        add_proximal_(trained, [self._before[id(p)] for p in trained], mu)

    def state_dict(self) -> dict[str, Any]:
        """Returns what goes on in another run besides model and optimizers: of the server, if there is one."""
        return {} if self._settings.server is None else {"server": self._settings.server.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        if self._settings.server is not None and state.get("server"):
            self._settings.server.load_state_dict(state["server"])
