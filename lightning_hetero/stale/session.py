"""This rank and one parameter server, from its start to its end (layer L).

    lowest rank   serve: forks the server off this process -> an address, which the others are told
    every rank    connect -> a worker ... fetch_state, bring_home: the optimizers' state comes back ... leave
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_hetero.stale.layout import FlatLayout
from lightning_hetero.stale.process import ServerProcess
from lightning_hetero.stale.start import Address, connect, start_server
from lightning_hetero.stale.worker import Worker

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_hetero.stale.strategy import BoundedStalenessStrategy

__all__ = ["Session", "host_name", "patience"]


def host_name(strategy: BoundedStalenessStrategy) -> str:
    """Returns the name under which other nodes reach this one."""
    if strategy.num_nodes == 1:
        return "127.0.0.1"
    assert strategy.cluster_environment is not None
    if strategy.node_rank:  # rank 0 died in an earlier fit
        return socket.gethostname()
    return strategy.cluster_environment.main_address


def patience(strategy: BoundedStalenessStrategy) -> timedelta:
    """Returns how long to wait for others: the strategy's timeout, or torch's usual one."""
    return strategy.timeout or timedelta(minutes=30)


class Session:
    """See the module.

    Args:
        strategy: gives optimizers, settings and places.
        module: whose parameters and buffers are shared.

    Attributes:
        address: of the server, once `serve` or `connect` was called.
        worker: this rank's end, from `connect` to `leave`.

    Raises:
        ValueError: an optimizer updates a parameter that is not the module's.
    """

    def __init__(self, strategy: BoundedStalenessStrategy, module: LightningModule) -> None:
        self._strategy = strategy
        optimizers = strategy.optimizers
        named = {id(p): (name, p) for name, p in module.named_parameters()}
        owned = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        stray = [tuple(p.shape) for i, p in owned.items() if i not in named]
        if stray:
            raise ValueError(
                f"an optimizer updates {len(stray)} parameters that are not the LightningModule's (shapes"
                f" {stray[:3]}); register their module on the LightningModule"
            )
        entries = [entry for i, entry in named.items() if i in owned]
        buffers = list(module.named_buffers())
        self._settings = strategy.server_settings
        self._layout = FlatLayout.of(entries, buffers, optimizers=optimizers, codec=self._settings.codec)
        self._parameters, self._buffers = [p for _, p in entries], [b for _, b in buffers]
        self._groups = self._groups_now()
        self._process: ServerProcess | None = None
        self.worker: Worker | None = None
        self.address: Address | None = None

    def serve(self, *, members: Sequence[int], ahead: int, state: Mapping[str, Any]) -> Address:
        """Starts the server; returns where it is.

        Args:
            members: the ranks that take part from the start.
            ahead: batches that workers fetch ahead.
            state: of the coordinator, from a checkpoint; else empty.
        """
        strategy = self._strategy
        near = range(strategy.num_processes) if strategy.transport != "pairs" else ()
        self._process, self.address = start_server(
            layout=self._layout,
            parameters=self._parameters,
            buffers=self._buffers,
            optimizers=strategy.optimizers,
            settings=self._settings,
            ranks=members,
            near=near,
            far=[r for r in range(strategy.world_size) if r not in near],
            ahead=ahead,
            state=dict(state),
            host=host_name(strategy),
            timeout=patience(strategy),
        )
        return self.address

    def connect(self, address: Address) -> None:
        """Connects this rank to the server; the newest parameters come, the optimizers' state is the server's now."""
        strategy = self._strategy
        self.address = address
        self.worker = worker = Worker(
            connect(address, strategy.global_rank, self._layout, patience(strategy)),
            self._layout,
            self._parameters,
            self._buffers,
            strategy.optimizers,
            codec=self._settings.codec,
            # A scaler divides gradients in place after the backward pass, where no hook sees it.
            overlap=None if getattr(strategy.precision_plugin, "scaler", None) is None else False,
        )
        worker.attach()
        worker.pull()
        if not strategy.is_global_zero:
            for optimizer in strategy.optimizers:
                optimizer.state.clear()

    def _groups_now(self) -> list[list[list[int]]]:
        """Parameters of each group of each optimizer, by identity."""
        return [[[id(p) for p in g["params"]] for g in o.param_groups] for o in self._strategy.optimizers]

    @property
    def outdated(self) -> bool:
        """Whether the optimizers have other parameters than the server was started with."""
        return self._groups_now() != self._groups

    def fetch_state(self) -> dict[str, Any]:
        """Returns the server's state (lowest rank) with the parameters of the very same version on this rank."""
        worker = self.worker
        assert worker is not None
        while True:
            state = worker.state()
            # What callbacks have put in place of the newest parameters, e.g. averages, stays.
            if (worker.version if worker.is_newest else worker.pull()) == state["version"]:
                return state

    def bring_home(self, state: Mapping[str, Any]) -> None:
        """Puts the server's optimizer state, from `fetch_state`, into this process's optimizers."""
        known = zip(self._strategy.optimizers, self._groups, state["optimizers"], strict=True)
        for optimizer, groups, own in known:
            before = [i for group in groups for i in group]
            held = {before[index]: entry for index, entry in own["state"].items()}
            present = [id(p) for group in optimizer.param_groups for p in group["params"]]  # perhaps more than then
            entries = {index: held[i] for index, i in enumerate(present) if i in held}
            optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})

    def leave(self) -> None:
        """Says goodbye; the server ends with the lowest rank's session."""
        worker, self.worker = self.worker, None
        assert worker is not None
        worker.detach()
        try:
            worker.leave()
        finally:
            worker.link.close()
        self.close(patience_s=10.0)

    def close(self, *, patience_s: float = 5.0) -> None:
        """Ends this rank's session, without a word to anybody; idempotent."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.detach()
            worker.link.close()
        process, self._process = self._process, None
        if process is not None:
            process.stop(patience_s)
