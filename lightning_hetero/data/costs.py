"""What samples cost, where it is known before they are loaded: parts of a batch of equal cost (layer T)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np

from lightning_hetero.solvers.cut import cut_by_cost


class SampleCosts:
    """Moves the boundaries between the ranks' parts of a global batch to where these cost what their shares say.

    Args:
        given: cost of each sample by its index, or a function of the index.
        lower, upper: least and most samples per rank.
        quantum: parts of full batches are multiples of this many samples.

    Raises:
        ValueError: a cost is no finite number above 0; those of a function are seen when they are asked for.
    """

    def __init__(
        self, given: Sequence[float] | Callable[[Any], float], *, lower: Sequence[int], upper: Sequence[int],
        quantum: int = 1,
    ) -> None:  # fmt: skip
        self._function = given if callable(given) else None
        self._costs = np.empty(0) if callable(given) else np.asarray(given, dtype=np.float64)
        _check(self._costs, range(len(self._costs)))
        self.lower, self.upper, self.quantum = lower, upper, quantum

    def of(self, indices: Sequence[Any]) -> list[float]:
        """Returns the costs of these samples.

        Raises:
            ValueError: a function gives no cost for one of them, see above.
        """
        if self._function is None:
            return self._costs[list(indices)].tolist()
        costs = np.asarray([self._function(index) for index in indices], dtype=np.float64)
        _check(costs, indices)
        return costs.tolist()

    def cut(self, indices: Sequence[Any], shares: Sequence[int]) -> tuple[int, ...]:
        """Returns samples per rank for a batch of these samples, see `cut_by_cost`."""
        return cut_by_cost(self.of(indices), shares, lower=self.lower, upper=self.upper, quantum=self.quantum)


def _check(costs: np.ndarray, indices: Sequence[Any]) -> None:
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs > 0)))
    if len(wrong):
        index, cost = indices[wrong[0]], float(costs[wrong[0]])
        raise ValueError(
            f"the cost of sample {index!r} is {cost!r}; sample_costs, or sample_cost(i) of the dataset, must give a"
            " finite number > 0 for every sample"
        )


def check_sample_costs(given: object) -> None:
    """Checks the argument ``sample_costs``.

    Raises:
        TypeError: it is no sequence.
    """
    listed = hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, str)
    if not (given is None or listed):
        raise TypeError(
            f"sample_costs={given!r} must be a sequence of numbers > 0, one per sample of the train dataset, or None"
        )


def costs_in(dataset: object, given: Sequence[float] | None) -> Sequence[float] | Callable[[Any], float] | None:
    """Returns what tells samples' costs: as given, or the dataset's ``sample_cost``; None: nothing does.

    Raises:
        ValueError: as many as the dataset has samples must be given, and are not.
    """
    if given is None:
        return getattr(dataset, "sample_cost", None)
    samples = len(dataset) if isinstance(dataset, Sized) else None
    if samples is not None and len(given) != samples:
        raise ValueError(
            f"sample_costs has {len(given)} entries, but the train dataset has {samples} samples: give one per sample"
        )
    return given


def costs_digest(given: Sequence[float] | None) -> str:
    """Returns what ranks compare of their ``sample_costs``."""
    if given is None:
        return "None"
    return f"{len(given)} costs, {zlib.crc32(np.asarray(given, dtype=np.float64).tobytes()):#x}"
