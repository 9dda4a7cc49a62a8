"""Times what a rank can compute while it rests, to notice that its device has become faster or slower (layer T)."""

from __future__ import annotations

import time

import torch

__all__ = ["RestProbe"]

_SIZE = 256  # a product of such matrices takes about a millisecond on one core of a processor


class RestProbe:
    """Computes the same small product each time.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.full((_SIZE, _SIZE), 1.0 / _SIZE, device=device)
        self._product = torch.empty_like(self._matrix)

    @torch.no_grad()
    def seconds(self) -> float:
        """Returns what it took this time [s]; on a GPU it waits for that [CUDA, untested]."""
        cuda = self._matrix.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._matrix.device)
        started_s = time.perf_counter()
        torch.mm(self._matrix, self._matrix, out=self._product)
        if cuda:
            torch.cuda.synchronize(self._matrix.device)
        return time.perf_counter() - started_s
