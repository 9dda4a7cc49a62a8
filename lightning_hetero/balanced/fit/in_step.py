"""What a rank gives to a gathering inside of a training step (layer L)."""

from __future__ import annotations

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hetero.data import Part

__all__ = ["InStep"]


class InStep:
    """Keeps rows of dummies out, and warns once of numbers whose plain mean is not the mean over samples."""

    def __init__(self) -> None:
        self._warned = False

    def given(self, part: Part, tensor: Tensor) -> Tensor:
        """Returns what this rank gives."""
        if tensor.dim() and not part.samples and len(tensor) == part.dummy:
            return tensor[:0]
        if tensor.numel() == 1 and tensor.is_floating_point() and len(set(part.shares)) > 1 and not self._warned:
            self._warned = True
            rank_zero_warn(
                "self.all_gather of a number in a training step: the ranks have parts of unequal size (now"
                f" {'/'.join(map(str, part.shares))}), so the plain mean of a loss of each is not the mean over the"
                " samples. self.trainer.strategy.reduce(loss.detach(), reduce_op='mean') is, as is"
                " self.log(..., sync_dist=True); or gather loss * n and n, the rank's samples. Sums stay right"
            )
        return tensor
