"""Workers as threads of one process, over the real transport: for tests of server and worker that need no more."""

from __future__ import annotations

import socket
import threading

import torch

from lightning_hetero.transport.base import Happened
from lightning_hetero.transport.link import LocalLink, RemoteLink, connect
from lightning_hetero.transport.listener import Listener
from lightning_hetero.transport.seqlock import ParameterArea, Slot


class InProcess:
    """A listener and links to it, in one process.

    Args:
        workers: number of workers; their ranks are 0..workers-1.
        slot_bytes, parameter_bytes: sizes.

    Attributes:
        listener: the server's end.
    """

    def __init__(self, workers: int, slot_bytes: int, parameter_bytes: int) -> None:
        self.listener = Listener(near=range(workers), slot_bytes=slot_bytes, parameter_bytes=parameter_bytes)
        self._links: dict[int, LocalLink | RemoteLink] = {}

    def link(self, rank: int) -> LocalLink | RemoteLink:
        """Connects a worker, before the server is started; which is told all the same."""
        happened: list[Happened] = []
        thread = threading.Thread(
            target=lambda: self._links.update({rank: connect(self.listener.near_address, rank)}), daemon=True
        )
        thread.start()
        while thread.is_alive():
            happened += self.listener.events(0.01)
        self.listener._happened[:0] = happened
        return self._links[rank]

    def kill(self, rank: int) -> None:
        """Ends a worker as SIGKILL would: its slot stays as it is, its thread gets ServerLostError at the next call."""
        self._links[rank]._connection.shutdown(socket.SHUT_RDWR)


def lone_link(slot_bytes: int, parameter_bytes: int) -> LocalLink:
    """Returns a link to no server, for what only writes its slot."""
    connection, other = socket.socketpair()
    other.close()
    parameters = torch.zeros(ParameterArea.size(parameter_bytes), dtype=torch.uint8)
    return LocalLink(connection, 0, 0, 60.0, Slot.empty(slot_bytes), ParameterArea(parameters, parameter_bytes))
