"""What travels when layers move: values with tensors in them, described, summed up, and sent in a few rounds (layer T).

    source    {key: value} ──► manifest: the same with a `Note` for each tensor
    all       manifests, in one message; then the bytes: all pairs at once, ``CHUNK_BYTES`` per pair and round;
              checksums of what has been sent, and of what lies there then, while the next rounds are under way
    target    rebuilt from manifest and bytes, if the checksums are equal

Tensors on a device that has a `DirectWay` to the target's stay on the devices; others go through host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_hetero.pipeline.runtime.own.owner_groups import Wait

__all__ = ["Manifest", "Note", "Parcel", "Way", "checksums", "exchange", "notes_of", "packed", "rebuilt", "room_for"]

Manifest = dict[Any, Any]
"""Values by key, with notes instead of tensors."""

CHUNK_BYTES = 16 * 2**20
"""Sent from one rank to another per round, at most."""

_ALONE_BYTES = 2**20  # a tensor from which on it is sent from where it is, to where it belongs
_UNDER_WAY = 2  # rounds
_POLL_S = 5e-5
_WORDS = 4096


class Way(Protocol):
    """See `DirectWay`, which this layer's neighbours make."""

    def send(self, payload: Tensor, ready: Any) -> None: ...

    def post_receive(self, size_bytes: int) -> tuple[Tensor, Any]: ...

    def arrived(self, work: Any) -> bool: ...

    def take_over(self, payload: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Note:
    """Stands for a tensor in a manifest.

    Attributes:
        shape, dtype: of the tensor.
        stride: of one that lies densely in another order than its dimensions, e.g. ``channels_last``; else empty.
        on_host: it is on the CPU though the rank's layers are not, such as an optimizer's counter.
        direct: it goes from device to device.
    """

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    on_host: bool
    direct: bool

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


Checksum = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What goes from one rank to another.

    Attributes:
        manifest: the values.
        tensors: in the order of its notes.
        checksums: of these, see `checksums`; known after `exchange`.
    """

    manifest: Manifest
    tensors: list[Tensor]
    checksums: dict[int, Checksum] = field(default_factory=dict[int, Checksum])

    @property
    def direct(self) -> list[Tensor]:
        """The tensors that go from device to device; none without elements."""
        pairs = zip(notes_of(self.manifest), self.tensors, strict=True)
        return [tensor for note, tensor in pairs if note.direct and note.size_bytes]

    def sum_up(self) -> None:
        """Adds the checksums that are missing."""
        missing = [i for i in range(len(self.tensors)) if i not in self.checksums]
        self.checksums.update(zip(missing, checksums([self.tensors[i] for i in missing]), strict=True))


def packed(values: Mapping[Any, Any], device: torch.device, *, direct: bool) -> Parcel:
    """Returns values as a parcel; tensors are those of the values, not copied.

    Args:
        values: by key; nests of tensors and of what can be pickled.
        device: of the sender's layers.
        direct: whether there is a way from device to device.

    Raises:
        TypeError: a tensor that is not dense.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(
                f"a tensor of layout {tensor.layout} on {tensor.device} and of shape {tuple(tensor.shape)} cannot be"
                " sent to another rank, only dense ones"
            )
    notes: list[Note] = []
    for tensor in tensors:
        stride = tensor.stride() if not tensor.is_contiguous() and _is_dense(tensor) else ()
        on_host = tensor.device.type != device.type
        notes.append(Note(tensor.shape, tensor.dtype, stride, on_host, direct and not on_host))
    given = iter(notes)
    manifest = pytree.tree_map(lambda leaf: next(given) if isinstance(leaf, Tensor) else leaf, dict(values))
    return Parcel(manifest, tensors)


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=lambda i: -tensor.stride(i))
    return tensor.permute(order).is_contiguous()


def notes_of(manifest: Manifest) -> list[Note]:
    """Returns the notes, in the order of the tensors."""
    return [leaf for leaf in pytree.tree_leaves(manifest) if isinstance(leaf, Note)]


def room_for(manifest: Manifest, device: torch.device) -> Parcel:
    """Returns a parcel to be filled.

    Args:
        manifest: of what comes.
        device: of the receiver's layers.
    """
    rooms: list[Tensor] = []
    for note in notes_of(manifest):
        place = torch.device("cpu") if note.on_host else device
        if note.stride:
            rooms.append(torch.empty_strided(note.shape, note.stride, dtype=note.dtype, device=place))
        else:
            rooms.append(torch.empty(note.shape, dtype=note.dtype, device=place))
    return Parcel(manifest, rooms)


def rebuilt(parcel: Parcel, sent: Mapping[int, Checksum]) -> dict[Any, Any]:
    """Returns the values of a parcel that has come.

    Args:
        parcel: after `exchange`.
        sent: checksums of the same where it came from.

    Raises:
        ValueError: a tensor is not what was sent; names its key.
    """
    notes = [(key, leaf) for key, value in parcel.manifest.items() for leaf in pytree.tree_leaves(value)]
    notes = [(key, leaf) for key, leaf in notes if isinstance(leaf, Note)]
    for i, (key, _) in enumerate(notes):
        if sent[i] != parcel.checksums[i]:
            raise ValueError(f"{key} has arrived with another checksum than it was sent with")
    given = iter(parcel.tensors)
    return pytree.tree_map(lambda leaf: next(given) if isinstance(leaf, Note) else leaf, parcel.manifest)


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[Checksum]:
    """Returns two numbers per tensor, of its bytes in the order of its elements: their sum, and one by position.

    Whole words of eight bytes are added up, wherever the tensor is; a device is waited for once.
    """
    sums = [_sums(tensor.detach().contiguous().view(-1).view(torch.uint8)) for tensor in tensors]
    found: list[Checksum] = [(0, 0)] * len(tensors)
    for device in {s.device for s in sums}:
        where = [i for i, s in enumerate(sums) if s.device == device]
        for i, (total, weighted) in zip(where, torch.stack([sums[i] for i in where]).tolist(), strict=True):
            found[i] = total, weighted
    return found


def _sums(data: Tensor) -> Tensor:
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:].to(torch.int64)
    rows = words.numel() // _WORDS * _WORDS
    weights = torch.arange(1, _WORDS + 1, dtype=torch.int64, device=data.device)
    total, weighted = rest.sum(), (rest * weights[: rest.numel()]).sum()
    for part in (words[:rows].view(-1, _WORDS).sum(0), words[rows:]):
        total = total + part.sum()
        weighted = weighted * 31 + (part * weights[: part.numel()]).sum()
    return torch.stack([total, weighted])


# ---- between ranks -----------------------------------------------------------------------------------------------


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
    _through_hosts(outgoing, incoming, notes, group, wait)
    if any(note.direct for found in notes.values() for note in found):
        _past_hosts(outgoing, incoming, group, wait, ways)
    for parcel in (*outgoing.values(), *incoming.values()):
        parcel.sum_up()


def _through_hosts(
    outgoing: Mapping[int, Parcel],
    incoming: Mapping[int, Parcel],
    notes: Mapping[tuple[int, int], Sequence[Note]],
    group: dist.ProcessGroup,
    wait: Wait,
) -> None:
    """Sends in rounds, of which two are under way at a time; what is complete is summed up beside the next ones."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    sources = {target: _Bytes(parcel, fill=False) for target, parcel in outgoing.items()}
    sinks = {source: _Bytes(parcel, fill=True) for source, parcel in incoming.items()}
    rounds = {pair: _rounds([found[i].size_bytes for i in _order(found)]) for pair, found in notes.items()}
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


def _order(notes: Sequence[Note]) -> list[int]:
    """Returns which tensors go through the hosts, largest first, the same on both sides."""
    found = [i for i, note in enumerate(notes) if not note.direct and note.size_bytes]
    return sorted(found, key=lambda i: -notes[i].size_bytes)


def _rounds(sizes_bytes: Sequence[int]) -> list[int]:
    """Returns how many bytes go in each round: of a large tensor alone, which spares copies; of small ones together.

    Args:
        sizes_bytes: of the tensors, largest first.
    """
    rounds: list[int] = []
    left = 0
    for size in sizes_bytes:
        if size >= min(_ALONE_BYTES, CHUNK_BYTES):
            rounds += [min(CHUNK_BYTES, size - begin) for begin in range(0, size, CHUNK_BYTES)]
        elif size <= left:
            rounds[-1] += size
            left -= size
        else:
            rounds.append(size)
            left = CHUNK_BYTES - size
    return rounds


class _Buffer:
    """Memory that is used again and again: what is new costs more than what is copied."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)

    def of(self, size: int) -> Tensor:
        if size > self._data.numel():
            self._data = torch.empty(size, dtype=torch.uint8)
        return self._data[:size]


class _Bytes:
    """The bytes of a parcel's tensors, one after the other, each in the order of its elements, on the host.

    Args:
        parcel: to be read, or to be filled; what goes from device to device is left out.
        fill: which of both.
    """

    def __init__(self, parcel: Parcel, *, fill: bool) -> None:
        self._parcel, self._fill = parcel, fill
        self._left = deque(_order(notes_of(parcel.manifest)))
        self._at = 0  # in the first of these
        self._staged: Tensor | None = None  # its bytes
        self._done: list[tuple[int, Tensor]] = []  # taken whole: number and bytes

    def take(self, size: int) -> list[Tensor]:
        """Returns where the next bytes are: views of the tensors, where these lie on the host and in order."""
        found: list[Tensor] = []
        while size:
            if self._staged is None:
                self._staged = self._bytes(self._parcel.tensors[self._left[0]])
            n = min(size, self._staged.numel() - self._at)
            found.append(self._staged[self._at : self._at + n])
            size -= n
            self._at += n
            if self._at == self._staged.numel():
                self._done.append((self._left.popleft(), self._staged))
                self._at, self._staged = 0, None
        return found

    def _bytes(self, tensor: Tensor) -> Tensor:
        if _lies_in_order(tensor):
            return tensor.detach().view(-1).view(torch.uint8)
        if not self._fill:
            return tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        return torch.empty(tensor.nbytes, dtype=torch.uint8)

    def complete(self) -> Callable[[], None]:
        """Returns what is to be done when all that was taken so far is there: put it in its place, and sum it up."""
        done, self._done = self._done, []

        def finish() -> None:
            for number, data in done:
                tensor = self._parcel.tensors[number]
                if self._fill and not _lies_in_order(tensor):
                    tensor.copy_(data.view(tensor.dtype).view(tensor.shape))
                if tensor.device.type == "cpu":
                    [self._parcel.checksums[number]] = checksums([tensor])

        return finish


def _lies_in_order(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _past_hosts(
    outgoing: Mapping[int, Parcel],
    incoming: Mapping[int, Parcel],
    group: dist.ProcessGroup,
    wait: Wait,
    ways: Mapping[int, Way],
) -> None:
    """Sends from device to device: every receive is posted, on all ranks, before the first send begins."""
    posted: list[tuple[int, list[Tensor], Any, Any]] = []
    for source, parcel in sorted(incoming.items()):
        if direct := parcel.direct:
            posted.append((source, direct, *ways[source].post_receive(sum(t.nbytes for t in direct))))
    ready = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    assert ready is not None
    wait(ready)
    for target, parcel in sorted(outgoing.items()):
        if direct := parcel.direct:
            payload = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in direct])
            event = None
            if payload.device.type == "cuda":  # [CUDA, untested]
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(payload.device))
            ways[target].send(payload, event)
    for source, tensors, payload, work in posted:
        while not ways[source].arrived(work):
            time.sleep(_POLL_S)
        data = ways[source].take_over(payload)
        for tensor, piece in zip(tensors, data.split([t.nbytes for t in tensors]), strict=True):
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
