"""What the ranks have in common when they have met: parameters, buffers, optimizer states (layer L).

    rows of numbers -> weighted average of parameters, buffers, optimizer states -> the server's step from it
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.elastic.run_meetings import RunMeetings
from lightning_hetero.federated.decide.rounds import ClientRow, digest_of, disagreement
from lightning_hetero.federated.fit.settings import FederatedSettings
from lightning_hetero.federated.runtime.averaging import add_proximal_, average_, average_states_, complete, kept_states
from lightning_hetero.transport.side_channel import SideChannel


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
        self, row: Callable[[float, object], ClientRow], members: Members, clients: RunMeetings | None
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

        def average() -> tuple[list[ClientRow], float]:
            tensors = self._tensors()
            mine = row(digest_of(kept_states(self._optimizers)), [(tuple(t.shape), str(t.dtype)) for t in tensors])
            rows = [ClientRow(*one) for one in self._channel.all_gather_row(mine)()]
            wait_s = time.perf_counter() - began_s
            if disagreement(rows) is None:
                self._average(tensors, rows)
            return rows, wait_s

        rows, wait_s = average() if clients is None else clients.together("average", average, self._copied)
        if said := disagreement(rows, members.alive):
            raise RuntimeError(said)
        server, trained = self._settings.server, self._parameters()
        if server is not None and sum(one.weight for one in rows) > 0:  # its step from the average, alike on all
            server.step([self._before.get(id(p), p.detach()) for p in trained], [p.detach() for p in trained])
        return rows, wait_s

    def _average(self, tensors: Sequence[Tensor], rows: Sequence[ClientRow]) -> None:
        total = sum(row.weight for row in rows)
        if not total > 0:
            return
        # Over the side channel where a rank may be lost in it: on gloo that is an error, and soon.
        on_host = self._channel.group
        group = on_host if self._settings.min_clients is not None else dist.group.WORLD
        part = rows[self._channel.rank].weight / total
        assert group is not None
        average_(tensors, part, group)
        optimizers = self._optimizers
        if len({row.states for row in rows}) > 1:
            for kept in self._channel.all_gather_object(kept_states(optimizers)):
                complete(optimizers, kept)
        average_states_(optimizers, part, group, on_host)

    def _copied(self) -> Callable[[], None]:
        """Copies what an average changes; returns what brings it back."""
        tensors, optimizers = self._tensors(), self._optimizers
        copies = [tensor.detach().clone() for tensor in tensors]
        states = [{p: copy.deepcopy(state) for p, state in optimizer.state.items()} for optimizer in optimizers]

        def bring_back() -> None:
            for tensor, saved in zip(tensors, copies, strict=True):
                tensor.detach().copy_(saved)
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)

        return bring_back

    def remember(self) -> None:
        """Takes what there is now for the last average."""
        trained = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad]
        self._trainable = {id(p) for p in trained}
        if self._settings.server is not None or self._settings.proximal:
            self._before = {id(p): p.detach().clone() for p in trained}

    def pull(self) -> None:
        """Adds FedProx's term to the gradients of a local step, in the gradients' scale."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        mu = self._settings.proximal * (scaler.get_scale() if scaler else 1.0)
        trained = [p for p in self._trainer.lightning_module.parameters() if id(p) in self._before]
        add_proximal_(trained, [self._before[id(p)] for p in trained], mu)
