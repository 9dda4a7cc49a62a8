"""Who is on the same node, and that nobody else gets in."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.transport.one_node import neighbours
from lightning_hetero.transport.one_node.neighbours import Neighbours
from lightning_hetero.transport.side_channel import SideChannel
from tests.ranks.harness import run_ranks

CPU = torch.device("cpu")


def meeting(rank: int, world_size: int) -> None:
    channel = SideChannel(dist.group.WORLD)
    node = Neighbours(channel, CPU)
    assert [peer in node for peer in range(world_size)] == [peer != rank for peer in range(world_size)]

    # In whatever order connections are made and accepted, several of one pair too.
    if rank < 2:
        connections = [node.connect(2) for _ in range(2)]
        for i, connection in enumerate(connections):
            connection.send(bytes([rank, i]))
    else:
        for peer in (1, 0, 1, 0):
            accepted = node.accept(peer, 20.0)
            assert accepted is not None
            assert tuple(accepted.recv(9)) in ((peer, 0), (peer, 1))
    dist.barrier()

    # A stranger who finds the socket's name but does not know the token.
    if rank == 2:
        assert node._listener is not None
        name = node._listener.getsockname()
        assert name.startswith(b"\0lightning-hetero-"), "no file anywhere"
        for words in (b"", b"x", neighbours._HELLO.pack(neighbours._MAGIC, 0, 3, bytes(16))):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(name)
                if words:
                    stranger.send(words)
                else:
                    stranger.shutdown(socket.SHUT_WR)
                assert node.accept(0, 0.05) is None
    node.close()
    dist.barrier()
    assert not any(peer in node for peer in range(world_size))


def refused() -> socket.socket:
    raise PermissionError(1, "Operation not permitted")


def apart(rank: int, world_size: int, places: Sequence[str]) -> None:
    """Ranks of other nodes, of other networks, in a sandbox without sockets, or with a GPU are not reached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "_place", lambda: places[rank].removesuffix(" sandbox"))
        if places[rank].endswith("sandbox"):
            patch.setattr(neighbours, "_listener", refused)
        node = Neighbours(SideChannel(dist.group.WORLD), torch.device("meta") if rank == 3 else CPU)
    found = [peer for peer in range(world_size) if peer in node]
    expected = {0: [1], 1: [0]}
    assert found == expected.get(rank, []), found
    node.close()


@pytest.mark.parametrize(
    ("part", "ranks", "given"),
    [(meeting, 3, ()), (apart, 4, (["a", "a", "b", "a"],)), (apart, 4, (["a", "a", "", "a sandbox"],))],
    ids=["meeting", "apart", "nowhere"],
)
def test_neighbours(part: Any, ranks: int, given: Sequence[Any]) -> None:
    run_ranks(ranks, part, *given)
