"""Cuts a collated batch into micro-batches, and joins what was computed on them (layer T).

What belongs to which sample is read from the batch:

| part of a batch                                             | a micro-batch gets                          |
|-------------------------------------------------------------|---------------------------------------------|
| tensor or array with one row per sample                     | its rows                                    |
| list or tuple with one item per sample                      | its items                                   |
| dict, list, tuple, named tuple, dataclass of such            | the same, each part cut                     |
| object with ``split(sizes)``, graph batch (``to_data_list``) | what that returns                           |
| number, string, 0-dim tensor, tensor with one row           | the same                                    |

Anything else is refused, rather than given to every micro-batch. A list that can be read both ways, ``[x, y]`` of two
samples, is a list of parts, as a DataLoader's default collate function makes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["join_outputs", "split_batch"]

WAY_OUT = (
    "give the batch a method split(sizes), or the LightningModule a method split_batch(batch, sizes), that returns one"
    " batch for each of the sizes"
)


# ---- apart -----------------------------------------------------------------------------------------------------


def split_batch(
    batch: Any,
    sizes: Sequence[int],
    *,
    samples: int,
    owner: object = None,
) -> list[Any]:
    """Returns one batch for each of ``sizes``, in the order of the samples; tensors are views.

    Args:
        batch: as the DataLoader made it.
        sizes: samples of each micro-batch.
        samples: of the whole batch.
        owner: the LightningModule, whose method ``split_batch(batch, sizes)`` goes first if there is one; not asked
            for a single micro-batch.

    Raises:
        ValueError: sizes that are not whole numbers >= 1, or do not sum up to ``samples``; a batch in which nothing
            belongs to single samples.
        TypeError: a part of which it is not known what belongs to which sample; says where it stands, and the way out.
    """
    sizes = tuple(sizes)
    if not sizes or any(type(size) is not int or size < 1 for size in sizes) or sum(sizes) != samples:
        raise ValueError(f"sizes={sizes} must be whole numbers >= 1 that sum up to samples={samples}")
    if len(sizes) == 1:
        return [batch]
    if callable(own := getattr(owner, "split_batch", None)):
        return _counted(own(batch, list(sizes)), sizes, "split_batch(batch, sizes)")
    pieces = _split(batch, sizes, "batch")
    if pieces is None:
        raise ValueError(
            f"nothing in this batch, a {type(batch).__name__}, has {samples} rows or items, one per sample, so it"
            f" cannot be cut into micro-batches of {sizes} samples; {WAY_OUT}"
        )
    return pieces


def _split(value: Any, sizes: tuple[int, ...], where: str) -> list[Any] | None:
    """Returns the pieces of a value; None if all micro-batches get the same.

    Raises:
        TypeError: see `split_batch`.
    """
    if isinstance(value, Tensor | np.ndarray):
        return _rows(value, sizes, where)
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | type):
        return None
    if isinstance(value, PackedSequence):
        raise TypeError(f"{where} is a PackedSequence, whose rows are not its samples; {WAY_OUT}")
    if callable(own := getattr(value, "split", None)):
        return _counted(own(list(sizes)), sizes, f"{type(value).__name__}.split(sizes)")
    if callable(getattr(value, "to_data_list", None)) and callable(getattr(type(value), "from_data_list", None)):
        graphs = value.to_data_list()
        if len(graphs) == sum(sizes):
            return [type(value).from_data_list(part) for part in _slices(graphs, sizes)]
    if isinstance(value, Mapping):
        return _parts({key: (value[key], f"{where}[{key!r}]") for key in value}, sizes, lambda p: _mapping(value, p))
    if is_dataclass(value):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        found = {name: (getattr(value, name), f"{where}.{name}") for name in names}
        return _parts(found, sizes, lambda parts: _dataclass(value, parts))
    if isinstance(value, list | tuple):
        return _sequence(value, sizes, where)
    if _holds_tensors(value):
        raise TypeError(
            f"{where} is a {type(value).__name__}, and what of it belongs to which sample is not known; {WAY_OUT}"
        )
    return None


def _rows(value: Tensor | np.ndarray, sizes: tuple[int, ...], where: str) -> list[Any] | None:
    if value.ndim == 0 or (value.shape[0] == 1 and sum(sizes) > 1):
        return None
    if value.shape[0] != sum(sizes):
        raise TypeError(
            f"{where} has the shape {tuple(value.shape)} in a batch of {sum(sizes)} samples, so its rows are not the"
            f" samples; {WAY_OUT}"
        )
    return list(value.split(sizes)) if isinstance(value, Tensor) else _slices(value, sizes)


def _sequence(value: list[Any] | tuple[Any, ...], sizes: tuple[int, ...], where: str) -> list[Any] | None:
    def rebuilt(parts: dict[Any, Any]) -> Any:
        if hasattr(value, "_make"):  # a named tuple
            return value._make(parts.values())  # type: ignore[union-attr]
        return type(value)(parts.values())

    try:
        pieces = _parts({i: (item, f"{where}[{i}]") for i, item in enumerate(value)}, sizes, rebuilt)
    except TypeError:
        if len(value) != sum(sizes) or hasattr(value, "_make"):
            raise
        pieces = None
    if pieces is None and len(value) == sum(sizes) and not hasattr(value, "_make"):
        return _slices(value, sizes)
    return pieces


def _parts(
    found: Mapping[Any, tuple[Any, str]], sizes: tuple[int, ...], rebuilt: Callable[[dict[Any, Any]], Any]
) -> list[Any] | None:
    """Returns containers of the parts' pieces; None if no part has any."""
    pieces = {key: _split(part, sizes, where) for key, (part, where) in found.items()}
    if all(piece is None for piece in pieces.values()):
        return None
    return [
        rebuilt({key: found[key][0] if piece is None else piece[i] for key, piece in pieces.items()})
        for i in range(len(sizes))
    ]


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


def _slices(value: Any, sizes: Sequence[int]) -> list[Any]:
    ends = list(accumulate(sizes))
    return [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _counted(pieces: Any, sizes: Sequence[int], what: str) -> list[Any]:
    pieces = list(pieces)
    if len(pieces) != len(sizes):
        raise ValueError(f"{what} returned {len(pieces)} batches for the sizes {tuple(sizes)}: return one each")
    return pieces


def _holds_tensors(value: Any) -> bool:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, n, None) for n in slots if isinstance(n, str))]
    return any(isinstance(item, Tensor | np.ndarray) for item in held)


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
    if not outputs or len(outputs) != len(sizes):
        raise ValueError(f"{len(outputs)} outputs for {len(sizes)} micro-batches: one each, and at least one")
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
