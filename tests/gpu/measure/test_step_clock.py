"""`Stopwatch` on a GPU: kernel time between stamps, read without synchronising the device."""

from __future__ import annotations

import time

import torch

from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, Stopwatch, when_backward_ends
from tests.gpu.kit import of_kernels

pytestmark = of_kernels
CYCLES = 200_000_000  # about 0.1 s on present devices; only ratios and margins of a factor matter


def _spin(cycles: int = CYCLES) -> None:
    torch.cuda._sleep(cycles)


def _spin_s() -> float:
    """Seconds of one `_spin`, by the host clock around a synchronised run."""
    _spin(1000)
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    _spin()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


def test_kernel_time_is_measured_and_readable_later() -> None:
    spin_s = _spin_s()
    watch = Stopwatch(device_of("cuda:0"))
    watch.resume()
    assert watch.running
    _spin()
    watch.pause()
    _spin(4 * CYCLES)  # between two intervals: not counted
    watch.resume()
    _spin()
    watch.close()
    assert not watch.running
    assert watch.take() is None  # the device is still busy, and the host did not wait for it
    torch.cuda.synchronize()
    seconds = watch.take()
    assert seconds is not None
    assert 0.5 * 2 * spin_s < seconds < 2 * 2 * spin_s
    assert watch.take() is None


def test_steps_come_out_in_order_and_an_abandoned_one_never() -> None:
    watch = Stopwatch(device_of("cuda:0"))
    for cycles in (CYCLES, CYCLES // 10):
        watch.resume()
        _spin(cycles)
        watch.close()
    watch.resume()
    _spin(10 * CYCLES)
    watch.reset()
    torch.cuda.synchronize()
    first, second = watch.take(), watch.take()
    assert first is not None and second is not None
    assert first > 3 * second
    assert watch.take() is None


def test_step_probe_on_cuda_holds_forward_and_backward() -> None:
    device = torch.device("cuda", 0)
    module = torch.nn.Linear(8, 1).to(device)
    probe = StepProbe(device_of(device))
    probe.attach(module)
    for _ in range(3):
        probe.arm()
        _spin()  # before forward: not counted
        out = module(torch.ones(4, 8, device=device))
        _spin()
        loss = out.sum()
        when_backward_ends(loss, probe.backward_ended)
        loss.backward()
        _spin()  # after backward: not counted
        probe.exchanged()
        probe.close()
    torch.cuda.synchronize()
    spin_s = _spin_s()
    seconds = [probe.take() for _ in range(3)]
    assert probe.take() is None
    for measured_s in seconds[1:]:
        assert measured_s is not None
        assert 0.5 * spin_s < measured_s < 2 * spin_s
