"""What a step done in pieces logs: collected from its pieces, logged once as the whole batch would (layer L).

Once, because a value logged with ``sync_dist=True`` is exchanged with the peers, which log once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_hetero import lightning_compat as compat

_Key = tuple[str, str, int]  # hook, name, and how often the same was logged in a piece before


@dataclass(slots=True)
class _Logged:
    """The values logged under one key, and what each counts in a mean."""

    log: Callable[..., None]
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)


class PieceLogs:
    """Stands between ``self.log`` in the pieces of one step and Lightning.

    Args:
        trainer: the running trainer.
        constant: see `compat.weigh_logs`.
    """

    def __init__(self, trainer: Trainer, constant: Callable[[int], bool]) -> None:
        self._trainer, self._constant = trainer, constant
        self._piece: dict[_Key, tuple[Any, Any, float, dict[str, Any]]] = {}
        self._step: dict[_Key, _Logged] = {}
        self._whole = False

    @contextmanager
    def collecting(self, piece: Any, samples: int | None) -> Iterator[None]:
        """Inside, what is logged is noted for this piece of so many samples; it counts from `keep` on.

        Args:
            piece: of the batch.
            samples: in it; None: it is the whole batch, and what is logged is not changed.
        """
        self._piece, self._whole = {}, samples is None
        if compat.results_of(self._trainer) is None:
            yield
            return
        undo = compat.divert_logs(self._trainer, self._take)
        try:
            with nullcontext() if samples is None else compat.as_batch(self._trainer, piece, samples):
                yield
        finally:
            undo()

    def _take(self, log: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
        size = options.get("batch_size")
        if self._whole:
            value, size = value.clone() if isinstance(value, Tensor) else value, math.nan
        elif size is None or self._constant(size):
            mean = isinstance(value, Tensor) and compat.logged_reduction(fx, name, options) == "mean"
            size = compat.size_of_batch(self._trainer, required=mean and options["on_epoch"])
        call = sum(known[:2] == (fx, name) for known in self._piece)
        value = value.detach() if isinstance(value, Tensor) else value
        self._piece[fx, name, call] = log, value, float(size), options

    def keep(self) -> None:
        """The piece is done."""
        for key, (log, value, size, options) in self._piece.items():
            logged = self._step.setdefault(key, _Logged(log, options))
            logged.values.append(value)
            logged.sizes.append(size)
        self._piece = {}

    def publish(self) -> None:
        """Logs what was kept."""
        for (fx, name, _), logged in self._step.items():
            if math.isnan(total := math.fsum(logged.sizes)):
                logged.log(fx, name, logged.values[0], **logged.options)
                continue
            size = int(total) if total.is_integer() else total
            logged.log(fx, name, _combined(fx, name, logged), **{**logged.options, "batch_size": size})
        self._step = {}


def _combined(fx: str, name: str, logged: _Logged) -> Any:
    """Returns the whole batch's value; of a metric, which has counted all pieces, the metric itself."""
    last = logged.values[-1]
    if not isinstance(last, Tensor):
        return last
    reduction = compat.logged_reduction(fx, name, logged.options)
    values = torch.stack([v if v.is_floating_point() else v.to(torch.get_default_dtype()) for v in logged.values])
    if reduction != "mean":
        return {"sum": values.sum, "max": values.amax, "min": values.amin}[reduction](0)
    if not any(logged.sizes):
        return values.mean(0)
    counted = [(v, size) for v, size in zip(values, logged.sizes, strict=True) if size]  # 0 * NaN is NaN
    return sum(v * size for v, size in counted) / sum(size for _, size in counted)
