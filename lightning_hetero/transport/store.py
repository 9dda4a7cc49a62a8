"""Stores of torch.distributed through which ranks find each other (layer T)."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, Store, TCPStore

from lightning_hetero.transport.side_channel import SideChannel


def host_store(host: str, timeout: timedelta, port: int = 0) -> TCPStore:
    """Returns a store hosted by this process; ``.port`` tells where.

    Args:
        host: address under which peers reach this machine. On a loopback address nobody else can connect.
        timeout: of the store's own operations.
        port: 0: any that is free.

    Raises:
        OSError, RuntimeError: the port is taken.
    """
    options: dict[str, Any] = {"is_master": True, "timeout": timeout, "wait_for_workers": False}
    if host in ("localhost", "127.0.0.1"):
        listening = socket.create_server(("127.0.0.1", port))
        port = listening.getsockname()[1]
        return TCPStore("127.0.0.1", port, master_listen_fd=listening.detach(), **options)
    return TCPStore(host, port, **options)


def run_store(channel: SideChannel, host: str, timeout: timedelta | None) -> Store:
    """Returns a store of a run's own, hosted by rank 0, which must live longest; a collective.

    Args:
        channel: over all ranks.
        host: address of rank 0's machine.
        timeout: of the store's own operations, and for the others to find it; None: torch's.
    """
    if channel.world_size == 1:
        return HashStore()
    options: dict[str, Any] = {"wait_for_workers": False}
    if timeout is not None:
        options["timeout"] = timeout
    store = TCPStore(host, 0, is_master=True, **options) if channel.rank == 0 else None
    port = channel.all_gather_object(store.port if store is not None else None)[0]
    return store or TCPStore(host, port, is_master=False, **options)
