"""Where every parameter, buffer and gradient lies in flat memory (layer T).

    area  [ parameter 0 | parameter 1 | ... | buffer 0 | ... ]             what the server publishes
    slot  [ present | numbers | buffer 0 | ... | gradient 0 | ... ]        what a worker pushes

Every entry begins at a multiple of 64 bytes and keeps its dtype and, if it is dense, its strides (channels_last stays
channels_last), so that one memcpy moves a whole model. ``present`` is one byte per parameter (`FINITE`, `NONFINITE`)
and one per buffer (`CHANGE`, `VALUE`): 0 if the push has nothing for it. ``numbers`` are float64, see
`HyperParameters`.
"""

from __future__ import annotations

import cmath
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_hetero.stale.runtime.hyper_parameters import HyperParameters

CompressionName: TypeAlias = Literal["bf16", "fp16"]
Range: TypeAlias = tuple[int, int]
"""First byte, and the one behind the last."""

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}

ALIGN_BYTES = 64
"""A cache line, and enough for every dtype and vector unit."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of the buffers that hold running statistics, as torch's normalisation layers have them."""

FINITE, NONFINITE = 1, 2
"""What a push says of a gradient that is present: the worker looks, which has just had it in its cache."""

CHANGE, VALUE = 1, 2
"""What a push has of a buffer: what to add to it, or what it is to be."""


def pool_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of ``dtype`` are summed: 16 bits in float32, others in their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_finite(gradient: Tensor) -> bool:
    """Whether a gradient on the host is finite; one reduction as a rule."""
    total = gradient.sum(dtype=pool_dtype(gradient.dtype)).item()
    # A sum of finite numbers may overflow, too: look closer before anybody is blamed.
    return cmath.isfinite(total) or bool(gradient.isfinite().all())


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Name, shape and memory format of one tensor."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Entry:
        """Describes a tensor.

        Raises:
            ValueError: it is not a dense tensor with known shape.
        """
        if is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet (a lazy module); run one forward pass before training")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"{name!r} is a {tensor.layout} tensor; only dense parameters and buffers can be shared")
        # torch keeps the strides of what fills its memory without gaps or overlap, in whatever order of dimensions.
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls(name=name, shape=tuple(tensor.shape), stride=stride, dtype=tensor.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def statistic(self) -> bool:
        """Whether it is a running statistic, which all contributions move."""
        return self.name.rpartition(".")[2] in STATISTICS

    @property
    def counts(self) -> bool:
        """Whether it is a single number. It may be a counter, so changes are added, also late ones."""
        return self.numel == 1 and self.dtype is not torch.bool

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def view(self, data: Tensor) -> Tensor:
        """Returns ``data`` (uint8, the entry's bytes) in the entry's dtype, shape and strides."""
        flat = data.view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns new CPU memory in the entry's shape and strides."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype or self.dtype)

    def flat(self, tensor: Tensor) -> Tensor:
        """Returns the elements of a tensor with the entry's strides in the order of memory, as a view (1-D)."""
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())


def check_compression(name: CompressionName | None) -> None:
    """Raises ValueError unless pushed gradients can be sent in this way; None: in the parameters' own dtype."""
    if name is not None and name not in _NARROW:
        raise ValueError(f"compression={name!r} must be None, {' or '.join(map(repr, _NARROW))}")


def _sent(entry: Entry, compression: CompressionName | None) -> Entry:
    """Returns an entry as its gradient is sent; complex and 16-bit ones are unchanged.

    float16 overflows above 65504 (as under DDP's ``fp16_compress_hook``); bfloat16 does not.
    """
    if compression is None or not entry.dtype.is_floating_point or entry.dtype.itemsize <= 2:
        return entry
    return replace(entry, dtype=_NARROW[compression])


def _place(sizes: Sequence[int]) -> tuple[tuple[Range, ...], int]:
    """Returns a range of bytes per size, one after the other, each aligned, and the end of all."""
    starts = list(accumulate((-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in sizes), initial=0))
    return tuple((at, at + size) for at, size in zip(starts, sizes, strict=False)), starts[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatLayout:
    """The area of all parameters and buffers, and a worker's slot for them; make it with `of`.

    Attributes:
        parameters, buffers: the entries, each tensor once.
        gradients: of each parameter, how its gradient is written into the slot.
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
    gradients: tuple[Entry, ...]
    ranges: tuple[Range, ...]
    parameter_bytes: int
    bytes: int
    present: Range
    number_range: Range
    buffer_ranges: tuple[Range, ...]
    gradient_ranges: tuple[Range, ...]
    slot_bytes: int
    digest: str

    @classmethod
    def of(
        cls, parameters: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]] = (), *,
        optimizers: Sequence[Optimizer] = (), compression: CompressionName | None = None,
    ) -> FlatLayout:  # fmt: skip
        """Lays out named tensors in the order given; one that occurs again (tied weights) counts once.

        Args:
            optimizers: whose hyper-parameters travel with each push.
            compression: as `check_compression` lets it pass.

        Raises:
            ValueError: a tensor is sparse, quantised or not initialised.
        """
        seen: set[int] = set()

        def entries(named: Sequence[tuple[str, Tensor]]) -> tuple[Entry, ...]:
            return tuple(Entry.of(n, t) for n, t in named if not (id(t) in seen or seen.add(id(t))))

        first, second, hyper = entries(parameters), entries(buffers), HyperParameters(optimizers)
        sent = tuple(_sent(entry, compression) for entry in first)
        ranges, end = _place([entry.bytes for entry in (*first, *second)])
        flags, numbers = len(first) + len(second), 8 * hyper.size
        (present, number_range, *rest), slot_end = _place([flags, numbers, *(e.bytes for e in (*second, *sent))])
        described = [(e.name, e.shape, e.stride, str(e.dtype)) for e in (*first, *second)]
        text = repr((len(first), described, compression, hyper.size, hyper.digest))
        return cls(
            parameters=first, buffers=second, gradients=sent, ranges=ranges,
            parameter_bytes=ranges[len(first)][0] if second else end, bytes=max(end, ALIGN_BYTES),
            present=present, number_range=number_range, buffer_ranges=tuple(rest[: len(second)]),
            gradient_ranges=tuple(rest[len(second) :]), slot_bytes=max(slot_end, ALIGN_BYTES),
            digest=hashlib.sha256(text.encode()).hexdigest()[:32],
        )  # fmt: skip

    # ---- the area ---------------------------------------------------------------------------------------------

    def views(self, area: Tensor) -> list[Tensor]:
        """Returns parameters and buffers as views of ``area`` (uint8, ``bytes`` long, any device)."""
        entries = (*self.parameters, *self.buffers)
        return [e.view(area[start:stop]) for e, (start, stop) in zip(entries, self.ranges, strict=True)]

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
