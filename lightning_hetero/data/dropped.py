"""Collate functions that leave samples out, so that a rank's loss is a mean over fewer than it was given (layer T)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert


@dataclass(slots=True)
class DroppedSamples:
    """Notices batches with fewer rows than samples, and warns once.

    A first dimension that never has other sizes, more than the samples or less than half of them is no dimension of
    samples.

    Attributes:
        rows: different sizes that were seen; None: nothing is looked at any more.
    """

    rows: set[int] | None = field(default_factory=set)

    def see(self, batch: Any, samples: int) -> None:
        """Takes a batch that was made of ``samples`` samples."""
        if self.rows is None:
            return
        rows = _rows(batch)
        if rows is None or not samples <= 2 * rows <= 2 * samples:
            self.rows = None
            return
        self.rows.add(rows)
        if rows < samples and len(self.rows) > 1:
            self.rows = None
            warnings.warn(
                f"a batch of {samples} samples has {rows} rows: the collate function leaves samples out, and ranks"
                " count by the samples that they were given. Say what a batch counts with batch_weight, an argument of"
                " the strategy or a method of the LightningModule, e.g. batch_weight=lambda batch: len(batch[0])",
                stacklevel=2,
            )


def watch_drops(loader: DataLoader, counted: bool) -> DroppedSamples:
    """Returns what looks at a loader's batches, unless the user says what counts or torch's own function collates."""
    return DroppedSamples(None if counted or loader.collate_fn in (default_collate, default_convert) else set())


def _rows(batch: Any) -> int | None:
    """Returns the length of the first tensor in a batch."""
    while not isinstance(batch, Tensor):
        batch = list(batch.values()) if isinstance(batch, Mapping) else batch
        if not isinstance(batch, list | tuple) or not batch:
            return None
        batch = batch[0]
    return len(batch) if batch.ndim else None
