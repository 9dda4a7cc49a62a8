"""What a step takes of a CUDA device's memory (layer T)."""

from __future__ import annotations

import torch

from lightning_hetero.shares.caps import MemoryCap, MemoryUse

__all__ = ["MemoryWatch"]


class MemoryWatch:
    """Measures the memory of each step on a CUDA device and keeps `MemoryCap.estimate` up to date; else does nothing.

    Other processes may use the device as well, so what is there is asked anew whenever more samples than ever have
    fitted. Never run on a GPU by us.

    Args:
        device: of this rank.
        cap: what is known of its memory.
    """

    def __init__(self, device: torch.device, cap: MemoryCap) -> None:
        self._device, self._cap = device, cap
        self._on = device.type == "cuda"
        self._use = MemoryUse()
        self._base_bytes = 0.0
        self._limit_bytes = 0.0
        self._asked_for = -1

    def begin(self) -> None:
        """A step begins."""
        if self._on:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base_bytes = float(torch.cuda.memory_allocated(self._device))

    def end(self, samples: int) -> None:
        """Its backward pass is over, and all samples have fitted at once."""
        if not self._on:
            return
        self._use.observe(samples, self._base_bytes, float(torch.cuda.max_memory_allocated(self._device)))
        if self._asked_for != self._cap.safe:
            self._asked_for = self._cap.safe
            free, _ = torch.cuda.mem_get_info(self._device)
            self._limit_bytes = float(free + torch.cuda.memory_reserved(self._device))
        self._cap.estimate = self._use.most(self._limit_bytes)
