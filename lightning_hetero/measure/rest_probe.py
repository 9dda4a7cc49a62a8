"""Times what a rank can compute while it rests, to notice that its device has become faster or slower (layer T)."""

from __future__ import annotations

import torch

from lightning_hetero.measure.timer import Timer

_SIZES = (256, 4096)  # of matrices; from the first on, until a product takes long enough
_LEAST_S = 5e-4  # for it not to be the launch that is timed


class RestProbe:
    """Computes the same product each time.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._timer = device, Timer(device)
        self._begin(_SIZES[0])
        self._timer.warm_up(self._multiply)
        while len(self._matrix) < _SIZES[1] and self.seconds() < _LEAST_S:
            self._begin(2 * len(self._matrix))

    def _begin(self, size: int) -> None:
        self._matrix = torch.full((size, size), 1.0 / size, device=self._device)
        self._product = torch.empty_like(self._matrix)

    def seconds(self) -> float:
        """Returns what it took this time [s]; waits for that."""
        start = self._timer.mark()
        self._multiply()
        return self._timer.seconds(start, self._timer.mark())

    @torch.no_grad()
    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
