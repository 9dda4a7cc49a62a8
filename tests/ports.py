"""Ports for processes that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Returns a port that nobody listens on, below those that Linux gives to connections: none takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # tests seed the other
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
