"""Whether index i is the same sample on every rank, told by three samples of the dataset (layer T).

Stock DDP leaves a rank's samples with the rank, so a dataset may differ between ranks: own files, a split by rank,
another order of a directory. An engine that moves samples between ranks would train some twice and others never.

A sample is read as the loader would read it: in a worker where the loader has workers, so that a dataset which opens
its files at the first sample opens none in the main process. Values are compared roughly, because different
devices do not decode and transform to the same last bit. What is random is found by a second read under another seed,
and left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.data.copies import keep_samples
from lightning_hetero.data.samplers import undrawn

Leaf = tuple[str, tuple[int, ...], Any]
"""Kind, shape, and up to `_PROBES` values of something in a sample."""

Print = dict[str, Leaf] | None
"""The leaves of one sample by their place in it; None: it could not be read."""

_PROBES = 64
_DECODED = 256  # elements from which an array is taken for a decoded or transformed signal
_ROUGH, _EXACT = 1e-2, 1e-5  # of the largest value: what decoders and FFTs of two machines differ by; rounding


def fingerprints(loader: DataLoader, indices: Sequence[Any], *, again: bool = False) -> list[Print]:
    """Returns what some samples of a map-style loader's dataset look like; random streams are unchanged.

    Args:
        loader: the user's; not changed.
        indices: of the dataset.
        again: under another seed of the global random streams, and what is drawn from other generators is drawn later.
    """
    reading = _Reading(loader.dataset, again=again, batched=loader.batch_sampler is None)
    if not loader.num_workers:
        return [reading[i] for i in indices]
    worker = DataLoader(
        reading, batch_size=None, sampler=list(indices), collate_fn=keep_samples, num_workers=1,
        timeout=loader.timeout, multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn, generator=torch.Generator(),
    )  # fmt: skip
    try:
        return list(worker)
    except Exception:  # training will say it in its own words
        return [None] * len(indices)


class _Reading(Dataset[Print]):
    """A dataset's samples, each as its fingerprint."""

    def __init__(self, dataset: Any, *, again: bool, batched: bool) -> None:
        self._dataset, self._again, self._batched = dataset, again, batched

    def __getitem__(self, index: Any) -> Print:
        with undrawn(self._dataset, seed=int(self._again)):
            try:
                index = [index] if self._batched else index
                sample = self._dataset[index]
                return dict(_leaves(self._dataset[index] if self._again else sample, "sample"))
            except Exception:  # training will say it in its own words
                return None


def differs(
    everyone: Sequence[Sequence[Print]], again: Sequence[Sequence[Print]] | None = None
) -> tuple[int, int, str] | None:
    """Returns a rank with other samples than rank 0, which sample and what of it; None: all ranks' are the same.

    Args:
        everyone: each rank's fingerprints.
        again: the same under another seed. What differs between the two on some rank is random and does not count.
    """
    for number, prints in enumerate(zip(*everyone, strict=True)):
        random = {
            place
            for rank, one in enumerate(prints)
            if again is not None
            for place in _places(one, again[rank][number])
        }
        for rank, one in enumerate(prints):
            if other := [place for place in _places(prints[0], one) if place not in random]:
                return rank, number, other[0]
    return None


def _places(a: Print, b: Print) -> Iterator[str]:
    """Yields the places where two samples differ."""
    if a is None or b is None:
        if a is not b:
            yield "it can be read on one rank only"
        return
    for place in sorted({*a, *b}):
        if place not in a or place not in b or not _alike(a[place], b[place]):
            yield place


def _alike(a: Leaf, b: Leaf) -> bool:
    (kind, shape, values), (other, others, against) = a, b
    if (kind, shape) != (other, others):
        return False
    if kind != "number":
        return values == against
    one, two = np.asarray(values), np.asarray(against)
    scale = max((float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) for v in (one, two)), default=0.0)
    rough = math.prod(shape) >= _DECODED
    return bool(np.allclose(one, two, rtol=0.0, atol=scale * (_ROUGH if rough else _EXACT), equal_nan=True))


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Leaf]]:
    """Yields what can be compared of a sample, with its place; unknown objects are left out."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"len({place})", ("length", (), len(value))
        for number, item in enumerate(value[:_PROBES]):
            yield from _leaves(item, f"{place}[{number}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name, None), f"{place}.{field.name}")
    elif isinstance(value, str):
        # Paths of one file may differ between nodes, up to its name.
        yield place, ("text", (), os.path.basename(value) if os.path.isabs(value) else value)
    elif isinstance(value, bytes):
        yield place, ("bytes", (len(value),), value[:_PROBES])
    elif (array := _array(value)) is not None:
        flat = array.reshape(-1)
        chosen = flat[np.linspace(0, max(0, flat.size - 1), min(flat.size, _PROBES)).astype(np.int64)]
        # Of integers, those that pictures and sound are stored in may differ a little.
        stored = array.dtype.kind == "f" or (array.dtype.itemsize <= 2 and array.size >= _DECODED)
        yield place, ("number" if stored else "integer", array.shape, tuple(chosen.tolist()))


def _array(value: Any) -> np.ndarray | None:
    """Returns what consists of numbers as an array, real ones as such: tensors, arrays, pictures, plain numbers."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return None
        value = value.detach().cpu()
        value = torch.view_as_real(value) if value.is_complex() else value
        value = (value.double() if value.is_floating_point() else value).numpy()
    elif not (isinstance(value, bool | int | float | complex) or hasattr(value, "__array_interface__")):
        return None
    array: Any = np.asarray(value)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag])
    return array if array.dtype.kind in "biuf" else None
