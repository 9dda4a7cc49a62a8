"""Page-locked host memory, so that copies from and to a GPU run beside its work (layer T)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pinned", "synchronize"]


class Pinned:
    """Registers memory somebody else allocated, e.g. mapped from a file; without effect where CUDA cannot do that.

    Args:
        memory: CPU memory; must outlive this object's use.

    Attributes:
        active: whether the memory is page-locked now.
    """

    def __init__(self, memory: Tensor) -> None:
        self._address = memory.data_ptr()
        self.active = False
        if torch.cuda.is_available():
            code = _runtime().cudaHostRegister(self._address, memory.numel() * memory.element_size(), 0)
            self.active = int(code) == 0

    def release(self) -> None:
        """Undoes it; idempotent."""
        if self.active:
            _runtime().cudaHostUnregister(self._address)
            self.active = False


def _runtime() -> Any:
    return torch.cuda.cudart()


def synchronize(devices: Iterable[torch.device]) -> None:
    """Waits for all work on these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
