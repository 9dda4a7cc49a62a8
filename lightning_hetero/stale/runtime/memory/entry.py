"""One tensor in flat memory, and what a push says of it (layer T)."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

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
            raise ValueError(
                f"{name!r} has no shape yet (a lazy module); run one forward pass before training"
            )
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(
                f"{name!r} is a {tensor.layout} tensor; only dense parameters and buffers can be shared"
            )
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride()) if _is_dense(tensor) else _contiguous(shape)
        return cls(name=name, shape=shape, stride=stride, dtype=tensor.dtype)

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


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() > 0


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())
