"""Times what a rank can compute while it rests, to notice that its device has become faster or slower (layer T)."""

from __future__ import annotations

import torch

from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.timer import Timer

__all__ = ["RestProbe"]

# A product of such matrices takes about a millisecond: on one core of a processor, and on an accelerator, where a small
# one would tell the time of its launch.
_HOST, _ACCELERATOR = 256, 2048


class RestProbe:
    """Computes the same product each time.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        size = _ACCELERATOR if device_of(device).asynchronous else _HOST
        self._matrix = torch.full((size, size), 1.0 / size, device=device)
        self._product = torch.empty_like(self._matrix)
        self._timer = Timer(device)

    @torch.no_grad()
    def seconds(self) -> float:
        """Returns what it took this time [s]; waits for that."""
        self._timer.warm_up(self._multiply)
        start = self._timer.mark()
        self._multiply()
        return self._timer.seconds(start, self._timer.mark())

    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
