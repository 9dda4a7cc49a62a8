"""Cuts a collated batch into micro-batches, and joins what was computed on them (layer T).

Which part of a batch belongs to which sample is known from its `Layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hetero.data.layouts import WAY_OUT, Layout, parts_of

# ---- apart -----------------------------------------------------------------------------------------------------


def split_batch(
    batch: Any, sizes: Sequence[int], layout: Layout | None, *, samples: int, owner: object = None
) -> list[Any]:
    """Returns one batch for each of ``sizes``, in the order of the samples; tensors are views.

    Args:
        batch: as the DataLoader made it.
        sizes: samples of each micro-batch.
        layout: of the loader's batches; not needed for a single micro-batch, or by an owner with its own way.
        samples: of the whole batch.
        owner: the LightningModule, whose method ``split_batch(batch, sizes)`` goes first if there is one; not asked
            for a single micro-batch.

    Raises:
        ValueError: sizes that are not whole numbers >= 1, or do not sum up to ``samples``.
        TypeError: a batch of another layout; says where, and the way out.
    """
    sizes = tuple(sizes)
    assert sum(sizes) == samples, (sizes, samples)
    if len(sizes) == 1:
        return [batch]
    if callable(own := getattr(owner, "split_batch", None)):
        return _counted(own(batch, list(sizes)), sizes, "split_batch(batch, sizes)")
    if layout is None:
        raise TypeError(f"what of a {type(batch).__name__} belongs to which sample is not known; {WAY_OUT}")
    pieces = _split(batch, sizes, layout, "batch")
    assert pieces is not None
    return pieces


def _split(value: Any, sizes: tuple[int, ...], layout: Layout, where: str) -> list[Any] | None:
    """Returns the pieces of a value; None if all micro-batches get the same.

    Raises:
        TypeError: see `split_batch`.
    """
    cut = layout.cut
    shape: tuple[int, ...] = tuple(value.shape) if isinstance(value, Tensor | np.ndarray) else ()
    if cut == "same":
        if shape != (layout.shape or ()):
            raise _other(where, f"the shape {shape} and not {layout.shape or ()}, as others had")
        return None
    if cut == "rows":
        if len(shape) <= layout.dim or shape[layout.dim] != sum(sizes):
            raise _other(where, f"the shape {shape} in a batch of {sum(sizes)} samples")
        return list(value.split(sizes, layout.dim)) if isinstance(value, Tensor) else _slices(value, sizes, layout.dim)
    if cut == "count":
        return [torch.full_like(value, size) if isinstance(value, Tensor) else type(value)(size) for size in sizes]
    if cut == "split" and callable(own := getattr(value, "split", None)):
        return _counted(own(list(sizes)), sizes, f"{type(value).__name__}.split(sizes)")
    if cut == "graphs" and hasattr(value, "to_data_list"):
        graphs: Any = value
        return [type(graphs).from_data_list(p) for p in _slices(_of(graphs.to_data_list(), sizes, where), sizes)]
    if cut == "items" and isinstance(value, list | tuple):
        return _slices(_of(value, sizes, where), sizes)
    parts = parts_of(value, where)
    if cut != "parts" or parts is None or parts.keys() != layout.parts.keys():
        raise _other(where, f"other contents (a {type(value).__name__}) than in the batches before")
    pieces = {key: _split(part, sizes, layout.parts[key], at) for key, (part, at) in parts.items()}
    if all(piece is None for piece in pieces.values()):
        return None
    return [
        _rebuilt(value, {key: parts[key][0] if piece is None else piece[i] for key, piece in pieces.items()})
        for i in range(len(sizes))
    ]


def _of(items: Sequence[Any], sizes: Sequence[int], where: str) -> Sequence[Any]:
    if len(items) != sum(sizes):
        raise _other(where, f"{len(items)} items in a batch of {sum(sizes)} samples")
    return items


def _other(where: str, found: str) -> TypeError:
    return TypeError(f"{where} has {found}: did the collate function leave samples out, or add some? {WAY_OUT}")


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return _mapping(value, parts)
    if isinstance(value, list | tuple):
        return value._make(parts.values()) if hasattr(value, "_make") else type(value)(parts.values())  # type: ignore[union-attr]
    return _dataclass(value, parts)


def _mapping(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(value) is dict or not isinstance(value, MutableMapping):
        return parts
    piece = copy.copy(value)  # keeps what the class knows besides: a default factory, an encoding
    for key, part in parts.items():
        piece[key] = part
    return piece


def _dataclass(value: Any, parts: dict[str, Any]) -> Any:
    piece = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(piece, name, part)  # frozen ones, too
    return piece


def _slices(value: Any, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    before = (slice(None),) * dim
    parts = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [value[(*before, part)] if dim else value[part] for part in parts]


def _counted(pieces: Any, sizes: Sequence[int], what: str) -> list[Any]:
    pieces = list(pieces)
    if len(pieces) != len(sizes):
        raise ValueError(f"{what} returned {len(pieces)} batches for the sizes {tuple(sizes)}: return one each")
    return pieces


# ---- together --------------------------------------------------------------------------------------------------


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Returns what a step would have returned for the whole batch, as far as that can be known.

    A loss (a single tensor, or under the key ``"loss"``), 0-dim floating tensors and floats become the mean over
    samples; tensors, arrays and lists with one row or item per sample are joined; what all micro-batches agree on as
    None stays None; dicts, lists and tuples of such are joined part by part. Of anything else, a list with the
    micro-batches' values is returned.

    Args:
        outputs: of each micro-batch in order; tensors are detached already.
        sizes: samples of each.

    Raises:
        ValueError: no outputs, or another number of them than of sizes.
    """
    if len(outputs) == 1:
        return outputs[0]
    return _join(list(outputs), list(sizes), loss=isinstance(outputs[0], Tensor))


def _join(values: list[Any], sizes: list[int], *, loss: bool = False) -> Any:
    first = values[0]
    if all(value is None for value in values):
        return None
    if len({type(value) for value in values}) > 1:
        return values
    if isinstance(first, Tensor):
        return _join_tensors(values, sizes, loss)
    if isinstance(first, float):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if isinstance(first, np.ndarray):
        rows = all(v.ndim and len(v) == size for v, size in zip(values, sizes, strict=True))
        return np.concatenate(values) if rows else values
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            return values
        parts = {k: _join([v[k] for v in values], sizes, loss=k == "loss") for k in first}
        return _mapping(first, parts)
    if isinstance(first, list | tuple):
        return _join_sequences(values, sizes)
    return values


def _join_tensors(values: list[Tensor], sizes: list[int], loss: bool) -> Any:
    first = values[0]
    if (loss and first.numel() == 1) or (first.ndim == 0 and first.is_floating_point()):
        if any(value.shape != first.shape for value in values):
            return values
        wide = torch.promote_types(first.dtype, torch.float32)
        weighted = torch.stack([v.to(wide) * size for v, size in zip(values, sizes, strict=True)])
        return (weighted.sum(0) / sum(sizes)).to(first.dtype)
    rows = all(v.ndim and v.shape[0] == size for v, size in zip(values, sizes, strict=True))
    if rows and len({v.shape[1:] for v in values}) == 1:
        return torch.cat(values)
    return values


def _join_sequences(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    if hasattr(first, "_make"):
        return first._make(_join(list(parts), sizes) for parts in zip(*values, strict=True))
    one_each = all(len(value) == size for value, size in zip(values, sizes, strict=True))
    # Of equal micro-batches, (loss, prediction) of two samples could be either: tensors are parts then.
    if one_each and (len(set(sizes)) > 1 or not all(isinstance(item, Tensor) for item in first)):
        return type(first)(item for value in values for item in value)
    if len({len(value) for value in values}) > 1:
        return values
    return type(first)(_join(list(parts), sizes) for parts in zip(*values, strict=True))
