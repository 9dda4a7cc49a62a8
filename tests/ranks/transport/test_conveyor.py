"""Pieces through blocks that two processes map: in order, in the same memory again, and nothing stays open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from lightning_hetero.transport.one_node.conveyor import BLOCK_BYTES, BLOCKS, Conveyor

Pair = tuple[Conveyor, Conveyor]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both sides in one process, which maps the same memory twice."""
    before = descriptors()
    one, other = map(Conveyor, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    one.close()
    other.close()
    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def put(side: Conveyor, value: int, size_bytes: int = 5) -> bool:
    room = side.room(size_bytes)
    if room is None:
        return False
    room.fill_(value)
    side.send(size_bytes)
    return True


def came(side: Conveyor) -> Tensor | None:
    side.look()
    found = side.piece()
    if found is not None:
        found = found.clone()
        side.give_back()
    return found


def test_blocks_are_used_again_when_they_are_given_back(pair: Pair) -> None:
    one, other = pair
    assert came(other) is None and one.settled
    for value in range(BLOCKS):
        assert put(one, value)
    assert not put(one, 99) and not one.settled
    first = came(other)
    assert first is not None and first.tolist() == [0] * 5
    assert not put(one, 99)
    one.look()
    assert put(one, 99, BLOCK_BYTES)
    rest = [piece for _ in range(BLOCKS) if (piece := came(other)) is not None]
    assert [int(piece[0]) for piece in rest] == [*range(1, BLOCKS), 99]
    assert rest[-1].numel() == BLOCK_BYTES and bool((rest[-1] == 99).all())
    one.look()
    assert one.settled and other.settled and came(other) is None


def test_what_was_sent_is_there_after_the_sender_has_closed(pair: Pair) -> None:
    one, other = pair
    assert put(one, 1) and put(other, 2)
    found = came(one)
    assert found is not None and found.tolist() == [2] * 5
    other.look()
    assert other.settled
    one.close()
    one.close()
    found = came(other)
    assert found is not None and found.tolist() == [1] * 5
    other.look()
    assert (other.broken or "").startswith("its connection is closed")


def test_memory_that_was_never_announced_is_given_up(pair: Pair) -> None:
    one, _ = pair
    assert one.room(3) is not None  # the fixture counts descriptors


def test_without_memory_there_is_an_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    with pytest.raises(OSError, match="Too many open files"):
        pair[0].room(1)
    monkeypatch.undo()
    assert pair[0].room(2) is not None
