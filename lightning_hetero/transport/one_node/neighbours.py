"""Which ranks are on this rank's node, and connections to them (layer T).

    neighbours = Neighbours(channel, device)            collective, once per run
    connection = neighbours.connect(peer)               the lower of the two ranks: does not wait
    connection = neighbours.accept(peer, timeout_s)     the higher one; None: not yet
    connection = neighbours.meet(peer, patience, what)  one or the other

Sockets have names that only the kernel knows, so nothing is left of a killed run; who connects must know the
listener's token, which only the ranks of the run have been told. A packet of such a connection comes whole, or not.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections import Counter
from pathlib import Path

import torch

from lightning_hetero.transport.one_node.blocks import are_to_be_had
from lightning_hetero.transport.patience import Patience
from lightning_hetero.transport.side_channel import SideChannel

__all__ = ["Neighbours"]

_HELLO = struct.Struct("<8sqq16s")
_MAGIC = b"lhlink1\0"
_BACKLOG = 128
_LOOK_S = 1.0  # at what became of others, while waiting


class Neighbours:
    """The ranks of one node; the constructor is collective. Used by one thread.

    Args:
        channel: over all ranks.
        device: of this rank's layers; memory that processes share is on the CPU.
    """

    def __init__(self, channel: SideChannel, device: torch.device) -> None:
        self._rank = channel.rank
        self._token = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        place = _place() if device.type == "cpu" else ""
        with contextlib.suppress(OSError):  # a sandbox without such sockets: nobody is near
            self._listener = _listener() if place else None
        place, own = (place, self._listener.getsockname()) if self._listener is not None else ("", b"")
        everyone = channel.all_gather_object((place, own, self._token))
        self._places = [where for where, _, _ in everyone]
        self._addresses = {
            rank: (name, token)
            for rank, (where, name, token) in enumerate(everyone)
            if place and where == place and rank != self._rank
        }
        self._connected: Counter[int] = Counter()  # how often, by peer: both sides count
        self._came: dict[tuple[int, int], socket.socket] = {}  # connections to be accepted, by peer and count

    def __contains__(self, peer: int) -> bool:
        return peer in self._addresses

    def are_near(self, one: int, other: int) -> bool:
        """Whether two ranks, maybe neither of them this one, are on a node; the same on all ranks."""
        return one != other and self._places[one] == self._places[other] != ""

    def meet(self, peer: int, patience: Patience, what: str) -> socket.socket:
        """Returns a new connection to any rank of the node: connects to a higher one, waits for a lower one.

        Ranks that meet several others begin with the highest: so they never wait in a circle.

        Args:
            peer: which calls this, too.
            patience: with it.
            what: it has not done if it does not come, e.g. "did not connect".

        Raises:
            RuntimeError: a rank has failed; or the peer has ended, or did not come in time. It names rank and cause.
        """
        deadline_s = patience.deadline_s()
        try:
            connection = self.connect(peer) if peer > self._rank else None
            while connection is None:
                connection = self.accept(peer, _LOOK_S)
                if connection is None:
                    patience.look(peer, deadline_s, what)
        except OSError as error:
            raise patience.failures.lost(peer, f"its connection is closed: {error.strerror}") from error
        return connection

    def connect(self, peer: int) -> socket.socket:
        """Returns a new connection to a higher rank, which will accept it later.

        Raises:
            OSError: it has ended.
        """
        name, token = self._addresses[peer]
        self._connected[peer] += 1
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(name)
            connection.send(_HELLO.pack(_MAGIC, self._rank, self._connected[peer], token), socket.MSG_NOSIGNAL)
        except BaseException:
            connection.close()
            raise
        return connection

    def accept(self, peer: int, timeout_s: float) -> socket.socket | None:
        """Returns the new connection of a lower rank; None if there is none after the timeout."""
        assert self._listener is not None
        wanted, deadline_s = (peer, self._connected[peer] + 1), time.monotonic() + timeout_s
        while wanted not in self._came:
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0.0:
                return None
            self._listener.settimeout(rest_s)
            try:
                self._greet(self._listener.accept()[0])
            except TimeoutError:
                return None
        self._connected[peer] += 1
        return self._came.pop(wanted)

    def _greet(self, connection: socket.socket) -> None:
        """Keeps a connection of a rank of this run; whoever does not greet as one does at once is sent away."""
        hello = b""
        connection.settimeout(1.0)
        with contextlib.suppress(OSError):
            hello = connection.recv(_HELLO.size)
        if len(hello) == _HELLO.size:
            magic, rank, count, token = _HELLO.unpack(hello)
            if magic == _MAGIC and hmac.compare_digest(token, self._token):
                self._came[rank, count] = connection
                return
        connection.close()

    def close(self) -> None:
        """No connection is made any more; those there are stay."""
        if self._listener is not None:
            self._listener.close()
        for connection in self._came.values():
            connection.close()
        self._came.clear()
        self._addresses.clear()


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(b"\0lightning-hetero-" + secrets.token_hex(8).encode())
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _place() -> str:
    """Returns what tells apart where processes reach one another; empty: nowhere."""
    if not are_to_be_had() or not hasattr(socket, "SOCK_SEQPACKET"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
