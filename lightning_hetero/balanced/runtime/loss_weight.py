"""Weights a rank's loss so that DDP's mean over ranks is the mean over the samples of the global batch (layer T).

    local loss L_r = mean over the rank's n_r samples,   DDP's gradient = (1/W) sum_r grad(w_r L_r)
    w_r = W n_r / N     =>     (1/W) sum_r W (n_r/N) grad L_r = grad of the mean over all N samples

The factor is applied to every micro-batch before its backward. A communication hook that weights the summed gradient
instead is wrong under gradient accumulation as soon as shares change inside the window, and with SyncBatchNorm
(measured: relative error 0.16 and 0.46), and it takes the hook away from the user.
Formula: LB-BSP, g = sum (x_i/X) g_i.

Not covered is what couples the samples of different ranks in forward while a rank is empty: the dummy sample counts in
SyncBatchNorm's statistics (as DDP's padding does), so use ``drop_last=True`` and ``min_samples >= 1`` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hetero.checked import real
from lightning_hetero.data.batches import Part
from lightning_hetero.data.order import Channel
from lightning_hetero.types import LossReduction


class LossWeight:
    """The loss factor of the current batch.

    Args:
        channel: sums the ranks' weights when ``batch_weight`` is given.
        world_size: number of ranks.
        reduction: ``"mean"`` if the user's loss is a mean over its batch, ``"sum"`` if it is a sum (then stock DDP's
            factor 1 is already right, except for a dummy batch).
        batch_weight: returns what the loss is a mean over, e.g. the number of tokens, when that is not samples.

    Attributes:
        local: what this rank's batch counts, in samples or in the user's unit.
    """

    def __init__(
        self, *, channel: Channel, world_size: int, reduction: LossReduction = "mean",
        batch_weight: Callable[[Any], float] | None = None,
    ) -> None:  # fmt: skip
        self._channel, self._world_size = channel, world_size
        self._reduction, self._batch_weight = reduction, batch_weight
        self.local = 1.0
        self._total: Callable[[], float] | None = None
        self._factor: float | None = 1.0

    def open(self, part: Part, batch: Any) -> None:
        """Takes the batch about to be trained on. With ``batch_weight`` it starts a sum that `factor` waits for."""
        self._total = None
        if self._batch_weight is None:
            self.local = float(part.samples)
            self._factor = part.weight if self._reduction == "mean" else float(part.samples > 0)
            return
        self.local = weight = real("batch_weight(batch)", self._batch_weight(batch)) if part.samples else 0.0
        self._factor = None
        self._total = self._channel.sum_async(weight)

    def open_equal(self, batch: Any) -> None:
        """Takes a batch of stock DDP's, of which every rank has an equal part; `local` says nothing without a unit."""
        alike = Part(epoch=0, step=0, samples=1, shares=(1,) * self._world_size, weight_base=float(self._world_size))
        self.open(alike, batch)

    def of_piece(self, piece: Any, samples: int, of_samples: int) -> float:
        """Returns the factor by which a piece's loss is a summand of the local loss of this rank's batch."""
        if self._batch_weight is not None and self.local > 0:
            return float(self._batch_weight(piece)) / self.local
        return 1.0 if self._reduction == "sum" and self._batch_weight is None else samples / of_samples

    @property
    def counts(self) -> bool:
        """Whether the user said what a batch counts."""
        return self._batch_weight is not None

    @property
    def waits(self) -> bool:
        """Whether `factor` would have to wait for the peers."""
        return self._factor is None

    def factor(self) -> float:
        """Returns the factor for the local loss; waits for the peers' weights if the user's unit is not samples."""
        if self._factor is None:
            assert self._total is not None
            total = self._total()
            self._factor = self._world_size * self.local / total if total > 0 else 0.0
        return self._factor
