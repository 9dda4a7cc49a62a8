"""Codecs: how a gradient lies in a worker's slot (layer T).

A push over a slow link may be made smaller: cast to 16 bits, or only the largest entries (top-k). What top-k leaves
out is not lost but added to the worker's next gradient (error feedback), so the sum of what is sent follows the sum of
the gradients. Sources: top-k with error feedback is Stich et al., *Sparsified SGD with Memory* (2018), and
Karimireddy et al. (2019); the interface is ours.
"""

from __future__ import annotations

import cmath
import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_hetero.stale.runtime.memory.entry import Entry

__all__ = ["Cast", "Codec", "CodecName", "TopK", "by_name", "pool_dtype"]

_HALF = (torch.float16, torch.bfloat16)


def pool_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of ``dtype`` are summed: 16 bits in float32, others in their own."""
    return torch.float32 if dtype in _HALF else dtype


class Codec(ABC):
    """Writes gradients into bytes and adds them to a pool. Stateless: a worker keeps the memory `encode` returns.

    Attributes:
        keeps_every_entry: `values` has the shape of the gradient, and its entries up to rounding.
    """

    keeps_every_entry: ClassVar[bool] = False

    @abstractmethod
    def bytes(self, entry: Entry) -> int:
        """Returns how many bytes a gradient of this parameter takes."""

    @abstractmethod
    def encode(self, gradient: Tensor, out: Tensor, entry: Entry, memory: Tensor | None) -> Tensor | None:
        """Writes a gradient (any strides) into ``out`` (uint8, on its device), for which nobody waits.

        Args:
            memory: what the last encoded gradient of this parameter returned; None at first.

        Returns:
            What to pass next time, None if nothing. A gradient may be encoded again after it was changed: then with
            the same memory as before.
        """

    @abstractmethod
    def values(self, data: Tensor, entry: Entry) -> Tensor:
        """Returns the floating numbers inside ``data``; if they are finite, so is the gradient."""

    @abstractmethod
    def add_to(self, pool: Tensor, data: Tensor, entry: Entry, alpha: float) -> None:
        """Adds ``alpha`` times the gradient in ``data`` to ``pool`` (the entry's strides, its pool dtype).

        Raises:
            ValueError: ``data`` is not what `encode` writes.
        """

    def put(self, pool: Tensor, data: Tensor, entry: Entry, alpha: float) -> None:
        """Like `add_to`, into a pool whose content is void."""
        pool.zero_()
        self.add_to(pool, data, entry, alpha)

    @staticmethod
    def finite(values: Tensor) -> bool:
        """Returns whether a gradient is finite, given its `values`; one reduction as a rule."""
        total = values.sum(dtype=pool_dtype(values.dtype)).item()
        # A sum of finite numbers may overflow, too: look closer before anybody is blamed.
        return cmath.isfinite(total) or bool(values.isfinite().all())

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self).items(), key=str)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class Cast(Codec):
    """Every entry, in ``dtype``; None: in the parameter's own. Complex and 16-bit gradients stay as they are.

    float16 overflows above 65504 (as under DDP's ``fp16_compress_hook``); bfloat16 does not.
    """

    keeps_every_entry = True

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def _dtype(self, entry: Entry) -> torch.dtype:
        narrow = self.dtype is not None and entry.dtype.is_floating_point and entry.dtype.itemsize > 2
        return self.dtype if narrow and self.dtype is not None else entry.dtype

    def bytes(self, entry: Entry) -> int:
        return entry.numel * self._dtype(entry).itemsize

    def encode(self, gradient: Tensor, out: Tensor, entry: Entry, memory: Tensor | None) -> None:
        entry.view(out, self._dtype(entry)).copy_(gradient)

    def values(self, data: Tensor, entry: Entry) -> Tensor:
        return entry.view(data, self._dtype(entry))

    def add_to(self, pool: Tensor, data: Tensor, entry: Entry, alpha: float) -> None:
        pool.add_(self.values(data, entry), alpha=alpha)

    def put(self, pool: Tensor, data: Tensor, entry: Entry, alpha: float) -> None:
        if alpha == 1.0:
            pool.copy_(self.values(data, entry))
        elif pool.dtype == (values := self.values(data, entry)).dtype:
            torch.mul(values, alpha, out=pool)
        else:
            pool.copy_(values).mul_(alpha)


class TopK(Codec):
    """The ``ratio`` largest entries of each gradient, by magnitude, with error feedback.

    Small ratios want a smaller learning rate or momentum correction; the recipe is no longer DDP's.

    Args:
        ratio: fraction of the entries that is sent, in (0, 1]; at least one entry per parameter.

    Raises:
        ValueError: ``ratio`` is out of range.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"TopK(ratio={ratio!r}) must be in (0, 1], e.g. 0.01 for one entry of a hundred")
        self.ratio = ratio

    def _count(self, entry: Entry) -> int:
        return min(entry.numel, max(1, math.ceil(self.ratio * entry.numel)))

    def _parts(self, data: Tensor, entry: Entry) -> tuple[Tensor, Tensor]:
        count = self._count(entry)
        return data[: 8 * count].view(torch.int64), data[8 * count :].view(pool_dtype(entry.dtype))

    def bytes(self, entry: Entry) -> int:
        return self._count(entry) * (8 + pool_dtype(entry.dtype).itemsize)

    def encode(self, gradient: Tensor, out: Tensor, entry: Entry, memory: Tensor | None) -> Tensor:
        exact = torch.empty_strided(
            entry.shape, entry.stride, dtype=pool_dtype(entry.dtype), device=gradient.device
        ).copy_(gradient)
        flat = entry.flat(exact)
        if memory is not None:
            flat.add_(memory)
        chosen = flat.abs().topk(self._count(entry), sorted=False).indices
        where, values = self._parts(out, entry)
        where.copy_(chosen)
        values.copy_(flat[chosen])
        flat[chosen] = 0
        return flat

    def values(self, data: Tensor, entry: Entry) -> Tensor:
        return self._parts(data, entry)[1]

    def add_to(self, pool: Tensor, data: Tensor, entry: Entry, alpha: float) -> None:
        where, values = self._parts(data, entry)
        if where.numel() and not 0 <= int(where.min()) <= int(where.max()) < entry.numel:
            raise ValueError(
                f"{entry.name!r} has {entry.numel} entries, a push names others: its memory is damaged"
            )
        entry.flat(pool).index_add_(0, where, values, alpha=alpha)


CodecName: TypeAlias = Literal["bf16", "fp16"]

_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def by_name(codec: Codec | str | None) -> Codec:
    """Returns the codec meant by ``None`` (as it is), ``"bf16"``, ``"fp16"`` or a codec.

    Raises:
        ValueError: any other name.
    """
    if isinstance(codec, Codec):
        return codec
    if codec is None:
        return Cast()
    if codec not in _NAMES:
        raise ValueError(
            f"compression={codec!r} must be None, {', '.join(map(repr, _NAMES))} or a codec such as TopK(0.01)"
        )
    return Cast(_NAMES[codec])
