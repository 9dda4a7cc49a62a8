"""The bytes of parcels go from rank to rank: all pairs at once, summed up where they were and where they are (layer T).

    as a rule                by gloo, in rounds: ``CHUNK_BYTES`` per pair; sums while the next are under way
    device to device         on the `DirectWay`s, where a tensor lies on a device that has one to the target's
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.measure.device import device_of
from lightning_hetero.pipeline.runtime.ownership.owner_groups import Wait
from lightning_hetero.pipeline.runtime.ownership.parcel_bytes import ParcelBytes, portions
from lightning_hetero.pipeline.runtime.ownership.parcels import Manifest, Parcel, notes_of

__all__ = ["Way", "exchange"]

CHUNK_BYTES = 16 * 2**20
"""Sent by gloo from one rank to another per round, at most."""

_UNDER_WAY = 2  # rounds


class Way(Protocol):
    """See `DirectWay`, which this layer's neighbours make."""

    def send(self, payload: Tensor) -> None: ...

    def receive(self, size_bytes: int) -> Tensor: ...


def exchange(
    outgoing: Mapping[int, Parcel],
    incoming: Mapping[int, Parcel],
    manifests: Sequence[Mapping[int, Manifest]],
    *,
    group: dist.ProcessGroup,
    wait: Wait,
    ways: Mapping[int, Way],
) -> None:
    """Sends parcels to other ranks, fills those that come from there, and sums up both; collective.

    Args:
        outgoing: by target.
        incoming: by source, to be filled.
        manifests: by source and target, the same on all ranks.
        group: over all ranks, one that takes CPU tensors (gloo).
        wait: see `Wait`.
        ways: by peer; for what is noted as direct.
    """
    notes = {(s, t): notes_of(manifest) for s, to in enumerate(manifests) for t, manifest in to.items()}
    sources = {target: ParcelBytes(parcel, fill=False) for target, parcel in outgoing.items()}
    sinks = {source: ParcelBytes(parcel, fill=True) for source, parcel in incoming.items()}
    rounds = {pair: portions(found, CHUNK_BYTES) for pair, found in notes.items()}
    _by_gloo(sources, sinks, rounds, group, wait)
    if any(note.direct for found in notes.values() for note in found):
        _past_hosts(outgoing, incoming, group, wait, ways)
    for parcel in (*outgoing.values(), *incoming.values()):
        parcel.sum_up()


def _by_gloo(
    sources: Mapping[int, ParcelBytes],
    sinks: Mapping[int, ParcelBytes],
    rounds: Mapping[tuple[int, int], Sequence[int]],
    group: dist.ProcessGroup,
    wait: Wait,
) -> None:
    """Sends in rounds, of which two are under way at a time; what has come is summed up beside the next ones.

    Args:
        sources, sinks: by peer.
        rounds: bytes of each, by source and target, the same on all ranks.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    buffers = deque((_Buffer(), _Buffer()) for _ in range(_UNDER_WAY))
    under_way: deque[Callable[[], None]] = deque()
    for number in range(max(map(len, rounds.values()), default=0)):
        if len(under_way) == _UNDER_WAY:
            under_way.popleft()()
        due = {pair: sizes[number] for pair, sizes in rounds.items() if number < len(sizes)}
        sent = [due.get((rank, target), 0) for target in range(world)]
        come = [due.get((source, rank), 0) for source in range(world)]
        pieces = [piece for target, n in enumerate(sent) if n for piece in sources[target].take(n)]
        rooms = [room for source, n in enumerate(come) if n for room in sinks[source].take(n)]
        buffers.rotate()
        send, receive = buffers[0]
        data = pieces[0] if len(pieces) == 1 else torch.cat(pieces, out=send.of(sum(sent))) if pieces else send.of(0)
        room = rooms[0] if len(rooms) == 1 else receive.of(sum(come))
        work = dist.all_to_all_single(room, data, come, sent, group=group, async_op=True)
        assert work is not None
        under_way.append(partial(_arrived, work, wait, rooms, room, [sink.complete() for sink in sinks.values()]))
        for source in sources.values():
            source.complete()()
    while under_way:
        under_way.popleft()()


def _arrived(
    work: dist.Work, wait: Wait, rooms: Sequence[Tensor], room: Tensor, complete: Iterable[Callable[[], None]]
) -> None:
    wait(work)
    if len(rooms) > 1:
        torch._foreach_copy_(list(rooms), list(room.split([r.numel() for r in rooms])))
    for finish in complete:
        finish()


class _Buffer:
    """Memory that is used again and again: what is new costs more than what is copied."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        if size > self._data.numel():
            self._data = torch.empty(size, dtype=torch.uint8)
        return self._data[:size]


def _past_hosts(
    outgoing: Mapping[int, Parcel],
    incoming: Mapping[int, Parcel],
    group: dist.ProcessGroup,
    wait: Wait,
    ways: Mapping[int, Way],
) -> None:
    """Sends from device to device, when all is ready to be sent: pair by pair, in one order on all ranks."""
    rank = dist.get_rank(group)
    payloads = {
        target: torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in direct])
        for target, parcel in outgoing.items()
        if (direct := parcel.direct)
    }
    for payload in payloads.values():
        device_of(payload.device).stamp().wait()
    ready = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    assert ready is not None
    wait(ready)
    sources = [source for source, parcel in incoming.items() if parcel.direct]
    for source, target in sorted([(rank, t) for t in payloads] + [(s, rank) for s in sources]):
        if source == rank:
            ways[target].send(payloads.pop(target))
            continue
        direct = incoming[source].direct
        data = ways[source].receive(sum(t.nbytes for t in direct))
        device_of(data.device).keep_for_stream(data)
        for tensor, piece in zip(direct, data.split([t.nbytes for t in direct]), strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
