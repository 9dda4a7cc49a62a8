"""What the doctor asks of GPUs, and what it does not."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.cli import machine
from lightning_hetero.measure.device import HostDevice

SMI = "GPU-aaaa, 1024\nGPU-bbbb, [N/A]\n"


class Card(HostDevice):
    """Has no memory left for whoever asks how much of it is free."""

    def identity(self) -> str:
        return {0: "aaaa", 1: "bbbb"}[self.device.index or 0]

    def capability(self) -> tuple[int, int] | None:
        return (7, 5)

    def total_bytes(self) -> float:
        return 8 * 2.0**30

    def free_bytes(self) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def computes_bfloat16(self) -> bool:
        return False


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "accelerators", lambda: [torch.device("cuda", i) for i in range(2)])
    monkeypatch.setattr(machine, "device_of", lambda device: Card(device))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=SMI))


def test_a_card_that_is_full_is_no_problem_and_its_free_memory_is_asked_elsewhere(cards: None) -> None:
    gpus = machine._gpus()
    found = gpus.devices
    assert gpus.problem == "" and [one.free_bytes for one in found] == [2.0**30, None]
    assert all(one.capability == (7, 5) and not one.computes_bfloat16 for one in found)


def test_without_nvidia_smi_it_is_not_known(cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert [one.free_bytes for one in machine._gpus().devices] == [None, None]


def test_a_driver_that_does_not_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment\nmore")

    monkeypatch.setattr(machine, "accelerators", broken)
    found = machine._gpus()
    assert found.problem == "CUDA unknown error - this may be due to an incorrectly set up environment"
    assert found.devices == ()
