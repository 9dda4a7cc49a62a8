"""`StepProbe` by a scripted clock: what counts as a step's own work, to the second."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.measure import kinds
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends

CPU = device_of("cpu")


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pass_s: Callable[[float], None], backward_s: float) -> Tensor:
        ctx.spend = (pass_s, backward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        pass_s, backward_s = ctx.spend
        pass_s(backward_s)
        return grad, None, None


class Spends(nn.Module):
    """Takes a given time in forward and in backward."""

    def __init__(self, clock: FakeClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.pass_s(self.forward_s)
        return _Passing.apply(x * self.scale, self.clock.pass_s, self.backward_s)


class Waits(Spends):
    """The same time, but spent waiting for peers."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(kinds, "time", SimpleNamespace(perf_counter=clock))
    return clock


@pytest.fixture
def probe(clock: FakeClock) -> StepProbe:
    return StepProbe(CPU, waiting=[Waits])


def ended(probe: StepProbe) -> None:
    probe.backward_ended()
    probe.close()


def step(probe: StepProbe, clock: FakeClock, module: nn.Module, fetch_s: float = 0.0, wait_s: float = 0.0) -> None:
    """One automatic step as `BalancedRun` stamps it."""
    clock.pass_s(fetch_s)
    probe.arm(fetch_s)
    loss = module(torch.ones(2, 1)).sum()
    when_backward_ends(loss, lambda: ended(probe))
    loss.backward()
    clock.pass_s(wait_s)
    probe.exchanged()


def test_step_is_fetch_forward_and_backward(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, forward_s=1.0, backward_s=2.0)
    probe.attach(module)
    step(probe, clock, module)
    assert probe.take_both() == pytest.approx((3.0, 0.0))
    module(torch.ones(1, 1))  # validation: not armed
    step(probe, clock, module, fetch_s=0.25, wait_s=7.0)
    assert probe.take() == pytest.approx(3.25)
    assert probe.take_wait() == pytest.approx(7.0)
    assert probe.take() is None and probe.take_wait() is None


def test_way_to_the_device_counts(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    with probe.transferring():  # of no step
        clock.pass_s(40.0)
    probe.arm()
    with probe.transferring():
        clock.pass_s(0.5)
    clock.pass_s(40.0)
    probe.start()
    clock.pass_s(3.0)
    ended(probe)
    assert probe.take() == pytest.approx(3.5)


def test_optimizer_belongs_to_the_next_step(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    step(probe, clock, module)
    probe.updating()
    clock.pass_s(0.25)
    with probe.paused():  # for the other ranks
        clock.pass_s(40.0)
    clock.pass_s(0.25)
    probe.updated()
    clock.pass_s(40.0)
    assert probe.take() == pytest.approx(3.0)
    step(probe, clock, module, fetch_s=0.25)
    assert probe.take() == pytest.approx(3.75)
    probe.updating()  # a window of accumulation: no optimizer works
    clock.pass_s(40.0)
    step(probe, clock, module)
    assert probe.take() == pytest.approx(3.0)


def test_time_before_forward_is_not_counted(probe: StepProbe, clock: FakeClock) -> None:
    """DDP broadcasts buffers before the module's forward; a second forward inside the step starts nothing anew."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    probe.arm()
    clock.pass_s(30.0)
    x = module(torch.ones(1, 1))
    loss = module(x).sum()
    when_backward_ends(loss, probe.backward_ended)
    loss.backward()
    clock.pass_s(30.0)
    probe.close()
    assert probe.take() == pytest.approx(6.0)


def test_waiting_modules_are_left_out(probe: StepProbe, clock: FakeClock) -> None:
    """In forward and backward; what stands behind may work in place, as ReLU does behind batch norm."""
    waits = Waits(clock, 40.0, 50.0)
    module = nn.Sequential(Spends(clock, 1.0, 2.0), waits, nn.ReLU(inplace=True), Spends(clock, 4.0, 8.0))
    probe.attach(module)
    step(probe, clock, module, wait_s=7.0)
    assert probe.take_both() == pytest.approx((15.0, 97.0))
    probe.detach()
    step(probe, clock, module)  # without its hooks the probe is blind
    assert probe.take() is None


def test_waiting_module_beside_a_shortcut(probe: StepProbe, clock: FakeClock) -> None:
    """The clock runs again as soon as the waiting module is done, not when all gradients of its input are there."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.waits, self.beside = Spends(clock, 1, 2), Waits(clock, 40, 50), Spends(clock, 4, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            beside = self.beside(x)  # built first, so differentiated last
            return self.waits(x) + beside

    module = Residual()
    probe.attach(module)
    step(probe, clock, module)
    assert probe.take() == pytest.approx(15.0)


def test_gradients_are_the_same_under_the_probe(probe: StepProbe, clock: FakeClock) -> None:
    grads = []
    for attached in (False, True):
        module = nn.Sequential(nn.Linear(1, 3), Waits(clock, 1, 1), nn.ReLU(inplace=True), nn.Linear(3, 1))
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.3)
        if attached:
            probe.attach(module)
        step(probe, clock, module)
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_pauses_nest(probe: StepProbe, clock: FakeClock) -> None:
    probe.arm()
    probe.start()
    clock.pass_s(1.0)
    with probe.paused():
        clock.pass_s(10.0)
        with probe.paused():
            clock.pass_s(10.0)
        clock.pass_s(10.0)
    clock.pass_s(2.0)
    probe.backward_ended()
    with probe.paused():  # a pause of a stopped watch starts nothing
        clock.pass_s(10.0)
    clock.pass_s(10.0)
    probe.close()
    probe.exchanged()
    assert probe.take_both() == pytest.approx((3.0, 50.0))


def test_two_backward_passes(probe: StepProbe, clock: FakeClock) -> None:
    """Manual optimization: each exchange is left out, and what follows it counts."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    probe.arm()
    for _ in range(2):
        loss = module(torch.ones(1, 1)).sum()
        when_backward_ends(loss, probe.backward_ended)
        loss.backward()
        clock.pass_s(20.0)
        probe.exchanged()
        probe.resume()
        clock.pass_s(0.5)  # optimizer
    probe.close()
    assert probe.take() == pytest.approx(7.0)
    assert probe.take_wait() == pytest.approx(40.0)


def test_closure_run_twice_counts_once(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    step(probe, clock, module)
    loss = module(torch.ones(2, 1)).sum()
    when_backward_ends(loss, lambda: ended(probe))
    loss.backward()
    probe.exchanged()
    assert probe.take() == pytest.approx(3.0)
    assert probe.take() is None


def test_abandoned_steps(probe: StepProbe, clock: FakeClock) -> None:
    """A step skipped before forward, or broken off in backward, leaves no time in the next one."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    step(probe, clock, module, wait_s=1.0)
    clock.pass_s(100.0)
    probe.arm(fetch_s=100.0)  # never started
    probe.arm(fetch_s=100.0)
    module(torch.ones(1, 1))  # started, never finished
    clock.pass_s(100.0)
    step(probe, clock, module, fetch_s=0.25, wait_s=2.0)
    assert probe.take_both() == pytest.approx((3.0, 1.0))
    assert probe.take_both() == pytest.approx((3.25, 2.0))
    assert probe.take_both() is None


def test_exchange_that_is_broken_off(probe: StepProbe, clock: FakeClock) -> None:
    """Own work was done, and told: each step keeps its own wait."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    probe.arm()
    loss = module(torch.ones(1, 1)).sum()
    when_backward_ends(loss, lambda: ended(probe))
    loss.backward()
    clock.pass_s(5.0)
    step(probe, clock, module, wait_s=7.0)
    assert probe.take_both() == pytest.approx((3.0, 5.0))
    assert probe.take_both() == pytest.approx((3.0, 7.0))
