"""What devices can do, on simulated GPUs."""

from __future__ import annotations

import torch

from lightning_hetero.measure.device import device_in_use, device_of
from tests.simgpu.harness import run_sim_ranks


def _here(rank: int, world: int) -> None:
    """Device and stream of the thread are put back, and random numbers go on where they were."""
    torch.cuda.set_device(1)
    known = device_in_use()
    assert known is device_of("cuda:1") and known.asynchronous
    stream = torch.cuda.Stream(torch.device("cuda", 1))
    torch.cuda.set_stream(stream)
    put_back, state = known.here(), known.random_state()
    drawn = torch.rand(3, device="cuda:1").cpu()
    torch.cuda.set_device(0)
    put_back()
    assert torch.cuda.current_device() == 1 and torch.cuda.current_stream() == stream
    known.set_random_state(state)
    assert torch.equal(torch.rand(3, device="cuda:1").cpu(), drawn)
    assert known.host_bytes(5).is_pinned()


def test_what_a_thread_uses_is_put_back() -> None:
    run_sim_ranks(1, _here, gpus=2)
