"""Starts the parameter server as a separate process and connects workers to it (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.policy import Policy
from lightning_hetero.stale.runtime.fork import ServerProcess, Watched, fork_server
from lightning_hetero.stale.runtime.layout import CompressionName, FlatLayout
from lightning_hetero.stale.runtime.serve.server import ParameterServer
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.base import Alive
from lightning_hetero.transport.link import WorkerLink
from lightning_hetero.transport.link import connect as connect_to
from lightning_hetero.transport.listener import Listener
from lightning_hetero.transport.membership import Limits
from lightning_hetero.transport.progress import WAITS
from lightning_hetero.transport.run_store import host_store

_CONNECT_S = 60.0  # for a worker that was told the address
_AWAITED_S = 90.0  # what the server allows: a worker that cannot connect gives up first
_LOOK_S = 1.0  # the longest that the server waits for events: it shows progress, and looks for its rank
SILENT_SIGNS = 12  # a worker that misses so many signs of life, one per `liveness_s`, is not waited for


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """What the server needs besides the model; see `BoundedStalenessStrategy`.

    Attributes:
        divide_by: a loss that is a sum: gradients of an update are divided by this, not by what they count.
        liveness_s: workers give a sign of life so often; see `Coordinator` for what else depends on it.
        compression: how gradients are sent; None: unchanged.
        transport: whether ranks on the server's node reach it through shared memory (``"auto"``); else all use pairs.
    """

    policy: Policy
    nonfinite: Literal["stop", "skip"] = "stop"
    divide_by: float | None = None
    liveness_s: float = 5.0
    compression: CompressionName | None = None
    transport: Literal["auto", "pairs"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where workers find the server.

    Attributes:
        near_server: for the ranks in ``near``, which share memory with it.
        far_server: for all others.
        host, port: of its store, for rebuilding the ranks' own group after a death.
    """

    near_server: str = field(repr=False)  # with the run's token
    far_server: str = field(repr=False)
    host: str
    port: int
    near: tuple[int, ...]

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Address:
        """Returns what `dataclasses.asdict` has made plain, also by way of JSON."""
        return cls(**{**said, "near": tuple(said["near"])})


def start_server(
    *, layout: FlatLayout, parameters: Sequence[Tensor], buffers: Sequence[Tensor],
    optimizers: Sequence[Optimizer], settings: ServerSettings, ranks: Sequence[int], near: Sequence[int],
    far: Sequence[int], ahead: int, state: dict[str, Any], host: str, timeout: timedelta,
) -> tuple[ServerProcess, Address]:  # fmt: skip
    """Forks the server off this process, with this process's parameters and optimizers as its own.

    Args:
        layout: of ``parameters`` and ``buffers``.
        parameters, buffers: present values; the server has its own copy from here on.
        optimizers: over these parameters; they stay untouched in this process.
        settings: see `ServerSettings`.
        ranks: the workers that take part from the start.
        near: all that may come from this node; they share memory with the server.
        far: all that may come from elsewhere, or share none.
        ahead: batches that workers fetch ahead.
        state: of the coordinator, from a checkpoint; else empty.
        host: name under which other nodes reach this one.
        timeout: of the store; how long workers wait at a meeting for one that lives and does not come; and how long
            the server may be at one piece of work.
    """
    listener = Listener(near=near, far=far, host=host, slot_bytes=layout.slot_bytes, parameter_bytes=layout.bytes)
    area = torch.empty(layout.bytes, dtype=torch.uint8)
    for view, tensor in zip(layout.views(area), [*parameters, *buffers], strict=True):
        view.copy_(tensor.detach())
    # Made here: a forked child must not touch a device. Nor may it free what it replaces, because torch may then ask
    # CUDA: this frame, which the child has too, holds it.
    _held = [(p.data, p.grad) for p in parameters], [(dict(o.state), *map(dict, o.param_groups)) for o in optimizers]
    moved = [
        {p: _on_cpu(dict(o.state[p])) for group in o.param_groups for p in group["params"] if o.state.get(p)}
        for o in optimizers
    ]
    groups = [[_on_cpu({k: v for k, v in g.items() if k != "params"}) for g in o.param_groups] for o in optimizers]

    def body(ready: Any, orphaned: Any) -> None:
        views = layout.views(area)
        for parameter, view in zip(parameters, views[: len(parameters)], strict=True):
            parameter.data = view
            parameter.grad = None
        for optimizer, states, entries in zip(optimizers, moved, groups, strict=True):
            optimizer.state.update(states)
            for group, moved_entries in zip(optimizer.param_groups, entries, strict=True):
                group.update(moved_entries | ({"capturable": False} if "capturable" in group else {}))
        store = host_store(host, timeout)
        coordinator = Coordinator(settings.policy, workers=ranks, ahead=ahead, liveness_s=settings.liveness_s)
        if state:
            coordinator.load_state_dict(state)
        shown = listener.memory.parameters
        server = ParameterServer(
            layout=layout, area=area, parameters=parameters, optimizers=optimizers, listener=listener,
            coordinator=coordinator, divide_by=settings.divide_by, nonfinite=settings.nonfinite, stamp=shown.stamp,
            limits=Limits(
                connect_s=_AWAITED_S, silence_s=SILENT_SIGNS * settings.liveness_s, meeting_s=timeout.total_seconds()
            ),
        )  # fmt: skip
        ready({"port": store.port}, Watched(lambda: shown.progress, listener.hangs, timeout.total_seconds()))
        try:
            serve(server, listener, awake_s, orphaned=orphaned)
        finally:
            listener.close()

    try:
        process = fork_server(body, keep=listener.fileno_list())
    except BaseException:
        listener.close()
        raise
    listener.detach()
    return process, Address(
        near_server=listener.near_address, far_server=listener.far_address, host=host, port=process.details["port"],
        near=tuple(near),
    )  # fmt: skip


def connect(address: Address, rank: int, timeout: timedelta) -> WorkerLink:
    """Returns this worker's link; raises ServerLostError if the server does not answer within a minute.

    Args:
        timeout: how long the server may show no progress afterwards.
    """
    place = address.near_server if rank in address.near else address.far_server
    return connect_to(place, rank, _CONNECT_S, timeout.total_seconds())


def _on_cpu(value: Any) -> Any:
    """Returns a tree of plain containers with its tensors on the host."""
    if isinstance(value, Tensor):
        return value if value.is_cpu else value.detach().cpu()
    if type(value) is dict:
        return {key: _on_cpu(each) for key, each in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (list, tuple) else value


def serve(
    server: ParameterServer, listener: Listener, clock: Callable[[], float], *,
    orphaned: Callable[[], bool] | None = None,
) -> None:  # fmt: skip
    """Serves until all workers have left or are gone, then closes the server; the listener is the caller's.

    Args:
        clock: monotonic time, as `awake_s` [s].
        orphaned: whether whoever started the server is gone; then it ends as soon as it has no worker, or all of them
            have been silent for so long as a meeting waits for one.
    """
    try:
        while not server.finished:
            if orphaned is not None and orphaned() and server.abandoned(clock()):
                return
            server.stamp(WAITS, 0)
            events = listener.events(max(0.0, min(server.wake_s() - clock(), _LOOK_S)))
            server.counts.waiting(sum(not isinstance(event, Alive) for event in events))
            while events:
                for event in events:
                    server.handle(event, clock())
                # Of two that die together, the death of one must not let the other one be met.
                events = listener.events(0.0) if server.meets else []
            server.wake(clock())
    except Exception as error:
        server.fail(f"the parameter server failed: {type(error).__name__}: {error}")
        raise
    finally:
        server.close()
