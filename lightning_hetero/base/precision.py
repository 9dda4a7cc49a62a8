"""In which numbers a Trainer computes, and whether the device can (layer L)."""

from __future__ import annotations

import warnings

import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_hetero.measure.device import device_of

_NAMES = {"bf16": torch.bfloat16, "transformer-engine": torch.bfloat16, "16": torch.float16, "64": torch.float64}


def trained_dtype(precision: object) -> torch.dtype:
    """Returns the dtype of matrix products under a Trainer's ``precision``, e.g. float16 under ``"16-mixed"``."""
    return next((dtype for name, dtype in _NAMES.items() if name in str(precision)), torch.float32)


def warn_of_emulation(precision: Precision, device: torch.device, rank: int) -> None:
    """Warns, on the rank concerned, of a device that only emulates what it is to compute."""
    on = device_of(device)
    if trained_dtype(precision.precision) is torch.bfloat16 and not on.computes_bfloat16():
        warnings.warn(
            f"rank {rank} ({on.name()}) does not compute bfloat16: it is emulated there, many times slower, and the"
            f" other ranks wait for it. Use precision='16-mixed' instead of {str(precision.precision)!r}, or leave the"
            " device out",
            RuntimeWarning,
            stacklevel=2,
        )
