"""In which numbers a Trainer computes, and the warning of a device that only emulates them."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.utils.data import DataLoader

from lightning_hetero.base import checks
from lightning_hetero.base.checks import trained_dtype, warn_of_emulation
from lightning_hetero.measure.device import HostDevice
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression

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


class Old(HostDevice):
    def name(self) -> str:
        return "RTX 2080"

    def computes_bfloat16(self) -> bool:
        return False


def test_a_card_without_bfloat16_is_named_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "device_of", lambda device: Old(device))
    with pytest.warns(RuntimeWarning, match=r"rank 3 \(RTX 2080\) does not compute bfloat16.*'16-mixed'"):
        warn_of_emulation(MixedPrecision("bf16-mixed", "cpu"), CPU, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emulation(MixedPrecision("16-mixed", "cpu", scaler=None), CPU, 3)


def _fitted(rank: int, world: int) -> list[str]:
    with patch.object(checks, "device_of", lambda device: Old(device)), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = rank_trainer(rank, world, balanced(), max_steps=1, precision="bf16-mixed")
        trainer.fit(Toy(torch.float32), DataLoader(regression(16, dtype=torch.float32), batch_size=4))
    return [str(one.message) for one in said if "does not compute bfloat16" in str(one.message)]


def test_a_fit_begins_with_it_on_the_rank_concerned() -> None:
    for rank, said in enumerate(run_ranks(2, _fitted)):
        assert len(said) == 1 and said[0].startswith(f"rank {rank} (RTX 2080)")


def test_devices_that_compute_it_are_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_emulation(MixedPrecision("bf16-mixed", "cpu"), CPU, 0)
