"""What of a collated batch belongs to which sample, learned from batches of several sizes (layer T).

| part of a batch, with 4, 3 and 2 samples                    | a micro-batch gets                          |
|-------------------------------------------------------------|---------------------------------------------|
| tensor or array with one dimension of 4, 3 and 2            | its part of that dimension                  |
| list or tuple of 4, 3 and 2 items                           | its items                                   |
| dict, list, tuple, named tuple, dataclass of such           | the same, each part cut                     |
| object with ``split(sizes)``, graph batch (``to_data_list``) | what that returns                           |
| whole number 4, 3 and 2                                     | the number of its samples                   |
| tensor or array of the same values, or of one row           | the same                                    |
| number, string, 0-dim tensor                                | the same                                    |

Anything else is refused, rather than given to every micro-batch. One size alone would prove nothing: a dimension of
time, or of channels, may happen to have as many entries as there are samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

WAY_OUT = (
    "give the batch a method split(sizes), or the LightningModule a method split_batch(batch, sizes), that returns one"
    " batch for each of the sizes"
)
_SIZES = (4, 3, 2)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one value is cut; picklable.

    Attributes:
        cut: ``"rows"`` of a tensor, ``"items"`` of a list, by the value's own ``"split"``, ``"graphs"``; ``"count"``:
            it is the number of samples; ``"parts"``: each in its own way; ``"same"``: not at all.
        dim: of the samples, for rows.
        parts: by key, index or name.
        shape: of a tensor that is the same for all.
    """

    cut: Literal["rows", "items", "split", "graphs", "count", "parts", "same"]
    dim: int = 0
    parts: Mapping[Any, Layout] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None

    @property
    def divides(self) -> bool:
        """Whether something in it belongs to single samples."""
        if self.cut == "parts":
            return any(part.divides for part in self.parts.values())
        return self.cut not in ("same", "count")


def learn_layout(collate: Callable[[list[Any]], Any], samples: Sequence[Any]) -> Layout:
    """Returns how the batches of a loader are cut.

    Args:
        collate: makes a batch of samples, as it will be when it is cut.
        samples: a few; at least one.

    Raises:
        TypeError: a part of which it is not known what belongs to which sample, or a batch in which nothing does; says
            where it stands, and the way out.
    """
    found = list(islice(cycle(samples), _SIZES[0]))  # the same few again, where there are fewer
    layout = _learn([collate(found[:size]) for size in _SIZES], "batch")
    if not layout.divides:
        raise TypeError(
            f"nothing in the loader's batches has as many rows or items as there are samples ({_numbers(_SIZES)} were"
            f" tried), so they cannot be cut into micro-batches; {WAY_OUT}"
        )
    return layout


def first_samples(loader: DataLoader, most: int, *, in_use: bool = False) -> list[Any]:
    """Returns the first samples of a dataset, as the loader would read them.

    Args:
        loader: whose dataset it is.
        most: how many.
        in_use: somebody reads it already: of a stream a copy is read.

    Raises:
        TypeError: a stream that is in use cannot be copied.
        ValueError: there are no batches.
    """
    if isinstance(loader.dataset, IterableDataset):
        samples = list(islice(iter(copy.deepcopy(loader.dataset) if in_use else loader.dataset), most))
    else:
        samples = [loader.dataset[i] for i in range(min(most, len(loader.dataset)))]  # type: ignore[arg-type]
    if not samples:
        raise ValueError("the train dataset is empty: there is nothing to measure the model with, or to train on")
    return samples


def _learn(values: Sequence[Any], where: str) -> Layout:
    first = values[0]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return Layout("count" if tuple(values) == _SIZES else "same")
    if _is_atom(first) and all(map(_is_atom, values)):
        return Layout("same")
    if len({type(value) for value in values}) > 1:
        kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in values))
        raise TypeError(f"{where} is of several types ({kinds}), depending on the samples; {WAY_OUT}")
    if isinstance(first, Tensor | np.ndarray):
        return _learn_array(values, where)
    if isinstance(first, PackedSequence):
        raise TypeError(f"{where} is a PackedSequence, whose rows are not its samples; {WAY_OUT}")
    if callable(getattr(first, "split", None)):
        return Layout("split")
    graphs = callable(getattr(first, "to_data_list", None)) and callable(getattr(type(first), "from_data_list", None))
    if graphs and tuple(len(value.to_data_list()) for value in values) == _SIZES:
        return Layout("graphs")
    if isinstance(first, list | tuple) and not hasattr(first, "_make"):
        counts = tuple(map(len, values))
        if counts == _SIZES:
            return Layout("items")
        if len(set(counts)) > 1:
            raise TypeError(f"{where} has {_numbers(counts)} items in batches of {_numbers(_SIZES)} samples; {WAY_OUT}")
    parts = parts_of(first, where)
    if parts is not None:
        others = [parts_of(value, where) or {} for value in values]
        if any(other.keys() != parts.keys() for other in others):
            raise TypeError(f"{where} has other parts in other batches; {WAY_OUT}")
        return Layout("parts", parts={k: _learn([o[k][0] for o in others], parts[k][1]) for k in parts})
    if _holds_tensors(first):
        raise TypeError(
            f"{where} is a {type(first).__name__}, and what of it belongs to which sample is not known; {WAY_OUT}"
        )
    return Layout("same")


def _learn_array(values: Sequence[Any], where: str) -> Layout:
    shapes = [tuple(value.shape) for value in values]
    first = shapes[0]
    if not first:
        return Layout("count" if _counts(values) else "same")
    if all(len(shape) == len(first) for shape in shapes):
        dims = [d for d, entries in enumerate(zip(*shapes, strict=True)) if entries == _SIZES]
        if len(dims) == 1:
            return Layout("rows", dim=dims[0])
        alike = len(set(shapes)) == 1
        if not dims and alike and (first[0] == 1 or all(_equal(values[0], value) for value in values[1:])):
            return Layout("same", shape=first)
    raise TypeError(
        f"{where} has the shapes {', '.join(map(str, shapes))} in batches of {_numbers(_SIZES)} samples, so it is not"
        f" known which dimension is that of the samples; {WAY_OUT}"
    )


def _counts(values: Sequence[Any]) -> bool:
    return all(str(value.dtype).rpartition(".")[2].startswith("int") for value in values) and (
        tuple(value.item() for value in values) == _SIZES
    )


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(np.array_equal(a, b))


def _is_atom(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | bool | int | float | complex | type)


def parts_of(value: Any, where: str) -> dict[Any, tuple[Any, str]] | None:
    """Returns the parts of a container, each with where it stands; None for all else."""
    if isinstance(value, Mapping):
        return {key: (value[key], f"{where}[{key!r}]") for key in value}
    if is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in fields(value) if hasattr(value, entry.name)]
        return {name: (getattr(value, name), f"{where}.{name}") for name in names}
    if isinstance(value, list | tuple):
        return {i: (item, f"{where}[{i}]") for i, item in enumerate(value)}
    return None


def _holds_tensors(value: Any) -> bool:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, n, None) for n in slots if isinstance(n, str))]
    return any(isinstance(item, Tensor | np.ndarray) for item in held)


def _numbers(values: Sequence[int]) -> str:
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
