"""Objects between the ranks of one job: the only place where what came over a process group is unpickled (layer T).

The law: what is unpickled comes from ranks of the same job, over a process group that the job has made, which no one
else can join. What comes from outside (a server's clients, files) is never given to `unpacked`. The collectives for
objects of `torch.distributed` follow the same law; those here wait as the caller says, e.g. with a look at what became
of the other ranks. Messages between stages travel over such a group, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[Any], object]
"""Waits for an operation, e.g. with a look at what became of the others, `FailureBoard.wait`."""


def packed(value: object, *, tensors: bool = False) -> Tensor:
    """Returns a value as bytes.

    Args:
        value: what can be pickled.
        tensors: it holds many tensors, on any device: views of the same memory stay such, as with `torch.save`.
    """
    if not tensors:
        return torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """Returns the value that `packed` has made bytes of, its tensors on the CPU if there were many."""
    text = data.numpy().tobytes()
    if text.startswith(b"PK"):  # `torch.save`'s zip file
        return torch.load(io.BytesIO(text), map_location="cpu", weights_only=False)
    return from_bytes(text)


def to_bytes(value: object) -> bytes:
    """Returns a small value, without tensors, as bytes."""
    return pickle.dumps(value, protocol=5)


def from_bytes(data: bytes) -> Any:
    """Returns the value that `to_bytes` has made bytes of; see the law above."""
    return pickle.loads(data)


def gathered(value: object, group: dist.ProcessGroup, wait: Wait) -> list[Any]:
    """Returns a value of every rank, by rank; collective.

    Args:
        value: this rank's, picklable.
        group: one that takes CPU tensors (gloo).
        wait: for a collective.
    """
    own, world = packed(value), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    wait(_work(dist.all_gather(sizes, torch.tensor([own.numel()]), group=group, async_op=True)))
    room = max(int(size) for size in sizes)
    values = [torch.empty(room, dtype=torch.uint8) for _ in range(world)]
    padded = torch.cat([own, own.new_zeros(room - own.numel())])
    wait(_work(dist.all_gather(values, padded, group=group, async_op=True)))
    return [unpacked(v[: int(n)]) for v, n in zip(values, sizes, strict=True)]


def send(data: Tensor, rank: int, group: dist.ProcessGroup, wait: Wait = dist.Work.wait) -> None:
    """Sends packed bytes to a rank, which receives them by `receive`.

    Args:
        data: from `packed`.
        rank: where to.
        group: one that takes CPU tensors (gloo).
        wait: for a send.
    """
    for tensor in (torch.tensor([data.numel()]), data):
        wait(_work(dist.isend(tensor, rank, group=group)))


def receive(rank: int, group: dist.ProcessGroup, wait: Wait = dist.Work.wait) -> Any:
    """Returns what a rank sends, unpacked; see `send`."""
    size = torch.zeros(1, dtype=torch.int64)
    wait(_work(dist.irecv(size, rank, group=group)))
    data = torch.empty(int(size), dtype=torch.uint8)
    wait(_work(dist.irecv(data, rank, group=group)))
    return unpacked(data)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
