"""The stopwatch in sharded modules on simulated GPUs: events of the stream that waits for the gathers' streams."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from tests.simgpu.harness import run_sim_ranks

CYCLES = 10_000_000, 40_000_000


class Busy(nn.Module):
    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.linear, self.cycles = nn.Linear(8, 8), cycles

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch.cuda._sleep(self.cycles)
        return x.sin()


def _steps(rank: int, world: int) -> list[tuple[float, float]]:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    device, mesh = torch.device("cuda", rank), init_device_mesh("cuda", (world,))
    layers = [Busy(CYCLES[rank]) for _ in range(4)]
    module = nn.Sequential(*layers).to(device)
    for one in (*layers, module):
        fully_shard(one, mesh=mesh)
    probe = StepProbe(device_of(device))
    probe.attach(module)

    def ended() -> None:
        probe.backward_ended()
        probe.close()

    with mock.patch.object(torch.UntypedStorage, "resize_", lambda self, size: self):  # a simulated device's cannot
        for _ in range(5):
            probe.arm()
            loss = module(torch.ones(2, 8, device=device)).sum() * 1.0
            when_backward_ends(loss, ended)
            loss.backward()
            probe.exchanged()
    torch.cuda.synchronize()
    rows = [probe.take_both() or (0.0, 0.0) for _ in range(5)]
    dist.destroy_process_group()
    return rows[1:]


def test_a_fast_rank_waits_in_its_stream() -> None:
    """The quietest step counts: a host that is late leaves its stream empty, which is its own time."""
    fast, slow = run_sim_ranks(2, _steps)
    fast_s = min(own_s for own_s, _ in fast)
    assert fast_s < 0.5 * min(own_s for own_s, _ in slow), (fast, slow)
    assert max(wait_s for _, wait_s in fast) > fast_s, (fast, slow)
