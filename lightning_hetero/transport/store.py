"""Stores of torch.distributed through which ranks find each other (layer T)."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore


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
