"""A collate function that shows with its first batch whether batches can be cut into pieces (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.data.micro_batches import WAY_OUT, split_batch

__all__ = ["ProvedCollate"]


class ProvedCollate:
    """Collates as ``collate`` does, and compares once a batch that is cut with batches that are collated of less.

    Sizes alone prove nothing: a batch of 16 sequences of 16 steps can be cut along either dimension. Which dimension
    follows the number of samples is seen from batches of one sample that is taken once, twice and three times.

    Args:
        collate: the loader's own function.
        most: samples that a rank may compute at once, for the error.

    Raises:
        TypeError: from the first batch on: batches cannot be cut.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], most: object) -> None:
        self.collate, self._most, self._proved = collate, most, False

    def __call__(self, samples: list[Any]) -> Any:
        if not self._proved:
            with torch.random.fork_rng(devices=[]):
                self._prove(samples[0])
            self._proved = True
        return self.collate(samples)

    def _prove(self, sample: Any) -> None:
        want = [self.collate([sample] * 2), self.collate([sample])]
        try:
            if _alike(split_batch(self.collate([sample] * 3), [2, 1], samples=3), want):
                return
            why = f"cut along the first dimension, a batch is not what is collated of fewer samples; {WAY_OUT}"
        except (TypeError, ValueError) as error:
            why = str(error)
        raise TypeError(
            f"max_samples={self._most!r} is less than a rank's part of a batch, which is computed in pieces: raise it,"
            f" or lower the batch. As it is, it cannot be cut: {why}"
        )


def _alike(one: Any, other: Any) -> bool:
    """Whether two values have the same structure, shapes and whole numbers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape
    if isinstance(one, int):
        return one == other
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(one[k], other[k]) for k in one)
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(_alike(a, b) for a, b in zip(one, other, strict=True))
    return getattr(one, "shape", None) == getattr(other, "shape", None)
