"""Where every parameter, buffer and gradient lies in flat memory (layer T).

    area  [ parameter 0 | parameter 1 | ... | buffer 0 | ... ]             what the server publishes
    slot  [ present | numbers | buffer 0 | ... | gradient 0 | ... ]        what a worker pushes

Every entry begins at a multiple of 64 bytes and keeps its dtype and, if it is dense, its strides (channels_last stays
channels_last), so that one memcpy moves a whole model. ``present`` is one byte per parameter (`FINITE`, `NONFINITE`)
and one per buffer (`CHANGE`, `VALUE`): 0 if the push has nothing for it. ``numbers`` are float64, see
`HyperParameters`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.stale.runtime.memory.entry import ALIGN_BYTES, Entry
from lightning_hetero.stale.runtime.memory.hyper_parameters import HyperParameters

CompressionName: TypeAlias = Literal["bf16", "fp16"]

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_compression(name: CompressionName | None) -> None:
    """Raises ValueError unless pushed gradients can be sent in this way; None: in the parameters' own dtype."""
    if name is not None and name not in _NARROW:
        raise ValueError(f"compression={name!r} must be None, {' or '.join(map(repr, _NARROW))}")


def _sent(entry: Entry, compression: CompressionName | None) -> Entry:
    """Returns an entry as its gradient is sent; complex and 16-bit ones stay as they are.

    float16 overflows above 65504 (as under DDP's ``fp16_compress_hook``); bfloat16 does not.
    """
    if compression is None or not entry.dtype.is_floating_point or entry.dtype.itemsize <= 2:
        return entry
    return replace(entry, dtype=_NARROW[compression])


def _align(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def _place(sizes: Sequence[int], start: int = 0) -> tuple[tuple[tuple[int, int], ...], int]:
    """Returns a range of bytes per size, one after the other, each aligned, and the end of all."""
    starts = list(accumulate((_align(size) for size in sizes), initial=_align(start)))
    return tuple((at, at + size) for at, size in zip(starts, sizes, strict=False)), starts[-1]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The area of all parameters and buffers, and a worker's slot for them; make it with `of`.

    Attributes:
        parameters, buffers: the entries, each tensor once.
        gradients: of each parameter, how its gradient is written into the slot.
        numbers: how many hyper-parameters a push carries.
        ranges: bytes ``[start, stop)`` in the area of each parameter, then of each buffer.
        parameter_bytes: end of the parameters in the area = start of the buffers.
        bytes: size of the area.
        present, number_range: bytes of the flags and of the hyper-parameters in the slot.
        buffer_ranges, gradient_ranges: bytes of each in the slot.
        slot_bytes: size of the slot.
        digest: hex digest of all that both sides must agree on; equal layouts have equal ones.
    """

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    compression: CompressionName | None
    numbers: int
    meaning: str = ""  # digest of what the numbers mean
    gradients: tuple[Entry, ...] = field(init=False)
    ranges: tuple[tuple[int, int], ...] = field(init=False)
    parameter_bytes: int = field(init=False)
    bytes: int = field(init=False)
    present: tuple[int, int] = field(init=False)
    number_range: tuple[int, int] = field(init=False)
    buffer_ranges: tuple[tuple[int, int], ...] = field(init=False)
    gradient_ranges: tuple[tuple[int, int], ...] = field(init=False)
    slot_bytes: int = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        sent = tuple(_sent(entry, self.compression) for entry in self.parameters)
        first, middle = _place([entry.bytes for entry in self.parameters])
        second, end = _place([entry.bytes for entry in self.buffers], middle)
        (present, numbers), at = _place([len(self.parameters) + len(self.buffers), 8 * self.numbers])
        buffers, at = _place([entry.bytes for entry in self.buffers], at)
        gradients, at = _place([entry.bytes for entry in sent], at)
        described = [(e.name, e.shape, e.stride, str(e.dtype)) for e in (*self.parameters, *self.buffers)]
        text = repr((len(self.parameters), described, self.compression, self.numbers, self.meaning))
        values = {
            "gradients": sent,
            "ranges": first + second,
            "parameter_bytes": middle,
            "bytes": max(end, ALIGN_BYTES),
            "present": present,
            "number_range": numbers,
            "buffer_ranges": buffers,
            "gradient_ranges": gradients,
            "slot_bytes": max(at, ALIGN_BYTES),
            "digest": hashlib.sha256(text.encode()).hexdigest()[:32],
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        parameters: Sequence[tuple[str, Tensor]],
        buffers: Sequence[tuple[str, Tensor]] = (),
        *,
        optimizers: Sequence[Optimizer] = (),
        compression: CompressionName | None = None,
    ) -> FlatLayout:
        """Lays out named tensors in the order given; one that occurs again (tied weights) counts once.

        Args:
            optimizers: whose hyper-parameters travel with each push.
            compression: see `check_compression`.

        Raises:
            ValueError: a tensor is sparse, quantised or not initialised, or the compression is unknown.
        """
        check_compression(compression)
        seen: set[int] = set()

        def entries(named: Sequence[tuple[str, Tensor]]) -> tuple[Entry, ...]:
            return tuple(Entry.of(n, t) for n, t in named if not (id(t) in seen or seen.add(id(t))))

        hyper = HyperParameters(optimizers)
        return cls(entries(parameters), entries(buffers), compression, hyper.size, hyper.digest)

    # ---- the area ---------------------------------------------------------------------------------------------

    def views(self, area: Tensor) -> list[Tensor]:
        """Returns parameters and buffers as views of ``area`` (uint8, ``bytes`` long, any device)."""
        if area.dtype is not torch.uint8 or area.shape != (self.bytes,):
            raise ValueError(
                f"an area must be uint8 of shape ({self.bytes},), not {area.dtype} {tuple(area.shape)}"
            )
        entries = (*self.parameters, *self.buffers)
        return [e.view(area[start:stop]) for e, (start, stop) in zip(entries, self.ranges, strict=True)]

    def adopt(self, area: Tensor, tensors: Sequence[Tensor]) -> None:
        """Moves tensors (parameters, then buffers, as in the layout) into ``area``: values copied, ``.data`` a view."""
        for view, tensor in zip(self.views(area), tensors, strict=True):
            view.copy_(tensor.detach())
            tensor.data = view

    # ---- the slot ---------------------------------------------------------------------------------------------

    def flags_of(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what is present: flags of parameters and of buffers (uint8 views)."""
        flags = slot[slice(*self.present)]
        return flags[: len(self.parameters)], flags[len(self.parameters) :]

    def numbers_of(self, slot: Tensor) -> Tensor:
        """Returns the hyper-parameters (a float64 view)."""
        return slot[slice(*self.number_range)].view(torch.float64)

    def buffer_of(self, slot: Tensor, index: int) -> Tensor:
        """Returns buffer ``index`` (a view)."""
        return self.buffers[index].view(slot[slice(*self.buffer_ranges[index])])

    def gradient_of(self, slot: Tensor, index: int) -> Tensor:
        """Returns gradient ``index`` (a view)."""
        return self.gradients[index].view(slot[slice(*self.gradient_ranges[index])])

    def values_of(self, slot: Tensor) -> list[Tensor]:
        """Returns every gradient in the slot (views). Costs more than reading them: keep it."""
        return [self.gradient_of(slot, i) for i in range(len(self.parameters))]
