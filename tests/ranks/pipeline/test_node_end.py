"""Links between processes of one node: memory is used where it is, and again; ends and failures are told."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_hetero.pipeline.decide.link_clock import LinkClock
from lightning_hetero.pipeline.decide.schedule import What
from lightning_hetero.pipeline.runtime.execute.links.end import Arrivals
from lightning_hetero.pipeline.runtime.execute.links.messages import Message, unpack
from lightning_hetero.pipeline.runtime.execute.links.node_end import NodeEnd

Pair = tuple[NodeEnd, NodeEnd]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends in one process, which map the same memory twice."""
    one, other = [
        NodeEnd(connection, Arrivals(LinkClock(), None))
        for connection in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ]
    yield one, other
    one.abort()
    other.abort()


def message(value: Tensor | None, m: int = 0) -> Message:
    return Message(what=What.ACTIVATION, micro_batch=m, value=value)


def come(end: NodeEnd) -> Message:
    found = end.take(0.0)
    assert isinstance(found, tuple)
    return unpack(*found[:2])


def test_a_message_is_not_copied_and_its_block_is_used_again_when_it_is_freed(pair: Pair) -> None:
    one, other = pair
    value = torch.randn(1000)
    one.post(message(value))
    first = come(other)
    address = first.value.data_ptr()
    view = first.value[:3]
    del first
    one.post(message(-value))
    second = come(other)
    assert torch.equal(view, value[:3]), "a view keeps the whole block"
    assert second.value.data_ptr() != address
    del view, second
    for _ in range(2000):  # far more than fit into the socket: who sends hears of free blocks when it needs one
        one.post(message(value))
        assert torch.equal(come(other).value, value)
    assert one._blocks.segments == 1 and address
    one.post(message(torch.zeros(2**20)))  # another size
    assert come(other).value.shape == (2**20,)
    assert one._blocks.segments == 2


def test_what_a_receiver_changes_in_place_nobody_else_sees(pair: Pair) -> None:
    one, other = pair
    value = torch.ones(100)
    one.post(message(value))
    one.post(message(value))
    come(other).value.zero_()
    assert torch.equal(come(other).value, value) and torch.equal(value, torch.ones(100))


def test_messages_wait_where_the_other_side_takes_nothing_and_come_in_order(pair: Pair) -> None:
    one, other = pair
    count = 5000
    for m in range(count):
        one.post(message(None if m % 2 else torch.full((10,), float(m)), m))
    assert not one.room(0.0), "the socket is full"
    for m in range(count):
        found = come(other)
        assert found.micro_batch == m and (m % 2 or found.value.tolist() == [float(m)] * 10)
        one.room(0.0)
    assert one.room(0.0) and one.wait_out(0.0)
    assert other.take(0.0) is None


def test_two_that_both_wait_for_room_make_room(pair: Pair) -> None:
    for m in range(2000):
        for end in pair:
            end.post(message(None, m))
    while not all([end.room(0.0) for end in pair]):
        pass
    for end in pair:
        assert [come(end).micro_batch for _ in range(2000)] == list(range(2000))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    """Mappings of links' memory; Python holds a descriptor for each."""
    return Path("/proc/self/maps").read_text().count("memfd:lightning-hetero")


def test_memory_and_descriptors_end_with_both_ends_and_the_tensors() -> None:
    gc.collect()
    before, maps = descriptors(), mapped()
    connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, other = [NodeEnd(connection, Arrivals(LinkClock(), None)) for connection in connections]
    del connections
    one.post(message(torch.ones(100)))
    kept = come(other).value
    for m in range(1000):  # the last of them stay unsent
        one.post(message(torch.ones(2**m if m < 20 else 1)))
    for end in (one, other):
        end.abort()
        assert end.broken == "it was aborted" and end.ended(0.0)
    del one, other, end
    assert torch.equal(kept, torch.ones(100))
    assert mapped() == maps + 1
    del kept
    assert (descriptors(), mapped()) == (before, maps)


def test_ends_are_told(pair: Pair) -> None:
    one, other = pair
    one.post(message(torch.ones(3)))
    one.post(None)
    assert not one.ended(0.0)
    assert come(other).value.tolist() == [1.0] * 3
    assert [other.take(0.0) for _ in range(2)] == ["it has closed its links"] * 2
    assert other.broken is None
    other.post(None)
    assert one.ended(0.0) and other.ended(0.0)


@pytest.mark.parametrize("at_work", [False, True])
def test_a_neighbour_that_dies_is_noticed_at_once(pair: Pair, at_work: bool) -> None:
    one, other = pair
    one.post(message(torch.ones(3)))
    if at_work:  # with something unread in its socket
        other.post(message(torch.ones(3)))
        other._packets.close()
        assert come(one).value.tolist() == [1.0] * 3
    else:
        come(other)
        other._packets.close()
    found = one.take(20.0)
    assert isinstance(found, str) and found.startswith("its connection is closed")
    assert one.broken == found and one.take(0.0) == found
    one.post(message(torch.ones(3)))
    assert not one.room(0.0) and one.ended(0.0)
