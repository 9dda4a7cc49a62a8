"""What the ranks have in common when they have met: parameters, buffers, optimizer states (layer L).

    rows of numbers -> weighted average of parameters, buffers, optimizer states -> the server's step from it
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.federated.decide.rounds import ClientRow, digest_of, disagreement
from lightning_hetero.federated.fit.clients import Clients
from lightning_hetero.federated.fit.settings import FederatedSettings
from lightning_hetero.federated.runtime.averaging import add_proximal_, average_
from lightning_hetero.federated.runtime.states import (
    OptimizerEntry,
    average_states_,
    complete,
    copied_states,
    kept_states,
    restore_states,
)
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Averaging:
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

    def _tensors(self) -> list[Tensor]:
        """Returns what is averaged: trained parameters, what the module saves besides, and averaged weights."""
        buffers = [
            buffer
            for layer in self._trainer.lightning_module.modules()
            for name, buffer in layer.named_buffers(recurse=False)
            if name not in layer._non_persistent_buffers_set
        ]
        unique = {id(t): t for t in (*self._parameters(), *buffers, *compat.averaged_weights(self._trainer))}
        return list(unique.values())

    def meet(
        self, row: Callable[[float, object], ClientRow], members: Members, clients: Clients | None
    ) -> tuple[list[ClientRow], float]:
        """Averages over the ranks that are there; a collective. Without weights nothing is changed.

        Args:
            row: returns what this rank tells the others, given a digest of what its optimizers keep, and what its
                tensors look like.
            members: the ranks that are there; others afterwards, if one is lost in it.
            clients: where ranks may be lost in it; else None.

        Returns:
            The rows of the ranks that are there, and how long they came late [s].

        Raises:
            RuntimeError: the ranks are at different places, or hold different things.
            TypeError: an optimizer keeps what has no average.
        """
        began_s = time.perf_counter()
        back: list[Callable[[], None]] = []

        def made() -> tuple[list[ClientRow], float]:
            if clients is not None:
                back[:] = [self._copied()]
            tensors = self._tensors()
            mine = row(digest_of(kept_states(self._optimizers)), [(tuple(t.shape), str(t.dtype)) for t in tensors])
            rows = [ClientRow(*one) for one in self._channel.all_gather_row(mine)()]
            wait_s = time.perf_counter() - began_s
            if disagreement(rows) is None:
                self._average(tensors, rows)
            return rows, wait_s

        result = made() if clients is None else clients.together("average", made, lambda: back[0]() if back else None)
        rows, _ = result
        if said := disagreement(rows, members.alive):
            raise RuntimeError(said)
        server, trained = self._settings.server, self._parameters()
        if server is not None and sum(one.weight for one in rows) > 0:  # its step from the average, alike on all
            server.step([self._before.get(id(p), p.detach()) for p in trained], [p.detach() for p in trained])
        return result

    def _average(self, tensors: Sequence[Tensor], rows: Sequence[ClientRow]) -> None:
        total = sum(row.weight for row in rows)
        if not total > 0:
            return
        # Over the side channel where a rank may be lost in it: on gloo that is an error, and soon.
        group = self._channel.group if self._settings.min_clients is not None else dist.group.WORLD
        part = rows[self._channel.rank].weight / total
        assert group is not None
        average_(tensors, part, group)
        if len({row.states for row in rows}) > 1:
            everyone = self._channel.all_gather_object([tuple(entry) for entry in kept_states(self._optimizers)])
            complete(self._optimizers, sorted({OptimizerEntry(*entry) for states in everyone for entry in states}))
        average_states_(
            self._optimizers,
            lambda states: average_(states, part, group),
            lambda numbers: dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._channel.group),
        )

    def _copied(self) -> Callable[[], None]:
        """Copies what an average changes; returns what brings it back."""
        tensors, optimizers = self._tensors(), self._optimizers
        copies = [tensor.detach().clone() for tensor in tensors]
        states = copied_states(optimizers)

        def bring_back() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.detach().copy_(copy)
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
