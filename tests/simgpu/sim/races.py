"""Work that nothing orders: two streams that use the same bytes, memory given back while another stream uses it.

Two pieces of work on the same bytes, one of which writes, must be ordered by the streams' clocks (`order.py`). Memory
goes back to the stream on which it was allocated, which may use it again at once: work of other streams on it must be
ordered before, or `Tensor.record_stream` must have told. The method is that of `torch.cuda._sanitizer`; this one knows
bytes, not only first addresses, and lifetimes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.simgpu.sim.native import lib
from tests.simgpu.sim.order import Stream, order
from tests.simgpu.sim.syncs import place


@dataclass(slots=True)
class _Use:
    stream: Stream
    number: int
    first: int
    last: int
    writes: bool
    told: str


@dataclass(slots=True)
class _Block:
    home: Stream
    uses: list[_Use]
    kept: set[Stream]


_blocks: dict[int, _Block] = {}


def uses(tensors: Sequence[tuple[Tensor, bool]], stream: Stream, what: str) -> int:
    """Notes a piece of work.

    Args:
        tensors: operands on the stream's device, each with whether it is written.
        stream: where it runs.
        what: name of the operation, for the message.

    Returns:
        The number of the work.

    Raises:
        RuntimeError: other work on the same bytes is not ordered before it.
    """
    orders = order()
    with orders.lock:
        settle()
        number = orders.work(stream)
        if orders.asynchronous:
            told = f"{what} on stream {stream[1]} at {place()}"
            for tensor, writes in tensors:
                at = torch.ops.simgpu.where(tensor)
                if at:
                    _use(at, writes, stream, number, told)
        return number


def _use(at: list[int], writes: bool, stream: Stream, number: int, told: str) -> None:
    orders = order()
    identity, device, home, first, last = at
    block = _blocks.get(identity)
    if block is None:
        block = _blocks[identity] = _Block((device, home), [], set())
    rest = []
    for use in block.uses:
        if use.last > first and last > use.first:  # the same bytes
            other = use.stream != stream
            if other and (writes or use.writes) and not orders.is_before(use.stream, use.number, stream):
                verb = "written" if use.writes else "read"
                orders.race(f"{told} {'writes' if writes else 'reads'} what is {verb} by {use.told}, without a wait")
            inside = first <= use.first and use.last <= last
            if inside and (writes or (not other and not use.writes)):
                continue  # this use comes after it, whoever asks
        rest.append(use)
    rest.append(_Use(stream, number, first, last, writes, told))
    block.uses = rest


def keep(identity: int, device: int, stream: int) -> int:
    """As `Tensor.record_stream`: the memory is not used again before the stream has come to here."""
    with order().lock:
        block = _blocks.get(identity)
        if block is not None:
            block.kept.add((device, stream))
    return 0


def held(tensors: Sequence[Tensor], stream: Stream, holds: bool) -> None:
    """Somebody else keeps the memory until the stream has used it, or no more: NCCL, until its work is waited for."""
    with order().lock:
        for tensor in tensors:
            at = torch.ops.simgpu.where(tensor)
            block = _blocks.get(at[0]) if at else None
            if block is not None and holds:
                block.kept.add(stream)
            elif block is not None:
                block.kept.discard(stream)


def settle() -> None:
    """Looks at the memory that was given back; called before any work, and before anybody waits.

    Raises:
        RuntimeError: another stream may still use it.
    """
    orders = order()
    for identity in lib().freed():
        block = _blocks.pop(identity, None)
        if block is None:
            continue
        for use in block.uses:
            if use.stream in (block.home, *block.kept) or orders.is_before(use.stream, use.number, block.home):
                continue
            orders.race(
                f"memory of stream {block.home[1]} was given back while it is used by {use.told}: "
                "neither a wait nor record_stream"
            )
