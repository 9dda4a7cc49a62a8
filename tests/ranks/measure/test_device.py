"""What devices can do, on the host; `tests/simgpu/measure` has the others."""

from __future__ import annotations

import torch

from lightning_hetero.measure.device import autocast_kinds, device_in_use, device_of


def test_without_an_accelerator_the_host_is_in_use() -> None:
    host = device_in_use()
    assert host.device == torch.device("cpu") and not host.asynchronous
    host.here()()
    assert host.random_state() is None and host.host_bytes(3).shape == (3,)
    assert autocast_kinds()[:2] == ("cpu", "cuda")
    assert host.widest_float() == torch.float64 and device_of("mps:0") is device_of("mps:0")
