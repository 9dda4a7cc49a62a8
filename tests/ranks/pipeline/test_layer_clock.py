"""Which layer a stage's time belongs to, forward and backward, by a clock that layers move on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.measure import kinds
from lightning_hetero.pipeline.runtime.execute.messages import Pass
from lightning_hetero.pipeline.runtime.execute.stages import Stage
from lightning_hetero.pipeline.runtime.measure.layer_clock import LayerClock

CPU = torch.device("cpu")


class Ticking:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    clock = Ticking()
    monkeypatch.setattr(kinds, "time", SimpleNamespace(perf_counter=clock))
    return clock


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Ticking, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now_s += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.clock.now_s += ctx.backward_s
        return grad, None, None, None


class Taking(nn.Module):
    """Takes so long forward and backward; frozen ones have no parameter. Returns a tensor among other things."""

    def __init__(self, clock: Ticking, forward_s: float, backward_s: float, *, frozen: bool = False) -> None:
        super().__init__()
        self.clock, self.spans = clock, (forward_s, backward_s)
        self.weight = nn.Parameter(torch.ones(3), requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return _Take.apply(x * self.weight, self.clock, *self.spans)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


def stage(layers: list[nn.Module], first: int = 2) -> tuple[Stage, LayerClock]:
    times = LayerClock(range(first, first + len(layers)), CPU)
    numbered = dict(enumerate(layers, first))
    return Stage(numbered, last=True, seed=0, checkpoint_layers=False, device=CPU, clock=times), times


def run(of: Stage, number: int, *, flag: bool = True, grad_enabled: bool = True) -> Any:
    way = Pass(step=0, number=number, grad_enabled=grad_enabled, autocast={})
    outputs, flight = of.forward(torch.ones(2, 3), [flag], way)
    return flight.backward([torch.ones_like(outputs)]) if grad_enabled else None


@pytest.mark.parametrize("flag", [True, False], ids=["behind another stage", "the first stage"])
def test_each_layer_has_its_own_time_forward_and_backward(clock: Ticking, flag: bool) -> None:
    spans = [(1.0, 2.0), (3.0, 5.0), (0.5, 10.0)]
    of, times = stage([Taking(clock, *each) for each in spans])
    for number in range(4):
        run(of, number, flag=flag)
        clock.now_s += 100.0  # somebody else's
    assert times.take() == pytest.approx([4 * sum(each) for each in spans])
    assert times.take() == []
    run(of, 0, grad_enabled=False)
    assert times.take() == [], "an evaluation is none of it"


def test_a_hiccup_counts_for_nothing(clock: Ticking) -> None:
    layers = [Taking(clock, 1.0, 1.0) for _ in range(3)]
    of, times = stage(list(layers))
    for number in range(5):
        layers[1].spans = (50.0, 1.0) if number == 3 else (1.0, 1.0)
        run(of, number)
    assert times.take() == [10.0, 10.0, 10.0]


def test_where_no_gradient_comes_a_layer_has_its_forward_pass(clock: Ticking) -> None:
    frozen = [Taking(clock, 1.0, 7.0, frozen=True), Taking(clock, 2.0, 7.0, frozen=True)]
    of, times = stage([*frozen, Taking(clock, 4.0, 8.0)])
    run(of, 0, flag=False)
    assert times.take() == [1.0, 2.0, 12.0]


def test_gradients_are_the_same_as_without_it() -> None:
    """Also where the next layer overwrites what the clock has its hook on."""
    found = []
    for timed in (True, False):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(3, 3), InPlace(), nn.Linear(3, 3), InPlace(), nn.Linear(3, 3)]
        if timed:
            of, _ = stage(layers)
        else:
            of = Stage(dict(enumerate(layers, 2)), last=True, seed=0, checkpoint_layers=False, device=CPU)
        (grad,) = run(of, 0)
        found.append([grad, *(p.grad for layer in layers for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("trained_before", [True, False])
def test_in_place_what_stands_around_the_layers_is_none_of_their_time(clock: Ticking, trained_before: bool) -> None:
    before, head = Taking(clock, 20.0, 30.0, frozen=not trained_before), Taking(clock, 40.0, 50.0)
    of, times = stage([Taking(clock, 1.0, 2.0), Taking(clock, 3.0, 5.0)])
    for number in range(3):
        loss = head(of.in_place((before(torch.ones(2, 3)),), {}, step=0, number=number)).sum()
        with of.going_back():
            loss.backward()
        clock.now_s += 100.0
    assert times.take() == [9.0, 24.0]
    with torch.no_grad():
        of.in_place((torch.ones(2, 3),), {}, step=0, number=0)
    assert times.take() == []
