"""In which numbers a Trainer computes, and the warning of a device that only emulates them."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_hetero.glue import precision
from lightning_hetero.glue.precision import trained_dtype, warn_of_emulation
from lightning_hetero.measure.device import Device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (Precision(), torch.float32),
        (MixedPrecision("16-mixed", "cpu", scaler=None), torch.float16),
        (MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16),
        (HalfPrecision("16-true"), torch.float16),
        (HalfPrecision("bf16-true"), torch.bfloat16),
        (DoublePrecision(), torch.float64),
    ],
    ids=lambda value: str(getattr(value, "precision", value)),
)
def test_the_precision_says_the_dtype(plugin: Precision, dtype: torch.dtype) -> None:
    assert trained_dtype(plugin.precision) is dtype


class Old(Device):
    def name(self) -> str:
        return "RTX 2080"

    def computes_bfloat16(self) -> bool:
        return False


def test_a_card_without_bfloat16_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "device_of", lambda device: Old(device))
    with pytest.warns(RuntimeWarning, match=r"rank 3 \(RTX 2080\) does not compute bfloat16.*'16-mixed'"):
        warn_of_emulation(MixedPrecision("bf16-mixed", "cpu"), CPU, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emulation(MixedPrecision("16-mixed", "cpu", scaler=None), CPU, 3)


def test_devices_that_compute_it_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emulation(MixedPrecision("bf16-mixed", "cpu"), CPU, 0)
