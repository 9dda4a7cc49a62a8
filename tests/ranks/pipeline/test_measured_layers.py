"""The layer profile: activations in bytes worked out by hand, times only by their structure.

A single process. No test asks for a certain time: stamps are counted by a clock of the tests' own where order matters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetero.types import AffineCost
from tests.ranks.pipeline.measured_kit import BYTES, F4, Counting, D, Function, kept, profile, rows


def with_reentrant(inner: nn.Module, x: Tensor) -> Any:
    return checkpoint(inner, x, use_reentrant=True)


def without_reentrant(inner: nn.Module, x: Tensor) -> Any:
    return checkpoint(inner, x, use_reentrant=False)


def residual(inner: nn.Module, x: Tensor) -> Tensor:
    return x + inner(x)


def split(inner: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return inner(x), (x, torch.ones(3))


def join(inner: nn.Module, value: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
    y, (x, ones) = value
    return inner(y * x) + ones.sum()


# ---- bytes worked out by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Linear(D, 2 * D)], [D]),  # its input, for the weight's gradient
        ([nn.ReLU()], [D]),  # its output
        ([nn.LayerNorm(D)], [D + 2]),  # its input, mean and deviation per row
        ([nn.Identity()], [0]),
        ([nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D)], [D, 2 * D, 0]),  # the ReLU's output is kept once
        ([nn.Linear(D, 2 * D), nn.ReLU(inplace=True), nn.Linear(2 * D, D)], [D, 2 * D, 0]),
        ([nn.ReLU(), nn.ReLU(), nn.LayerNorm(D)], [D, D, 2]),
        ([nn.Tanh(), nn.Unflatten(1, (2, D // 2)), nn.Flatten(), nn.Linear(D, D)], [D, 0, 0, 0]),  # views
        ([nn.Linear(D, D), nn.Identity(), nn.Linear(D, D)], [D, 0, D]),  # nobody kept what passes through
        ([nn.Sequential(nn.Linear(D, 3 * D), nn.ReLU(), nn.Linear(3 * D, D))], [D + 3 * D]),
        ([nn.Linear(D, D), Function(residual, nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))], [D, 3 * D]),
        ([nn.Linear(D, D), Function(without_reentrant, nn.Linear(D, 8 * D), nn.Tanh())], [D, D]),
        ([nn.Linear(D, D), Function(with_reentrant, nn.Linear(D, 8 * D), nn.Tanh())], [D, D]),
        ([nn.ReLU(), Function(without_reentrant, nn.Linear(D, 8 * D), nn.Tanh())], [D, 0]),
    ],
    ids=lambda value: "-".join(type(v).__name__ if isinstance(v, nn.Module) else str(v) for v in value),
)
def test_activations_are_what_autograd_keeps(layers: list[nn.Module], expected: list[int]) -> None:
    cost = profile(layers, rows(), sizes=[2, 4])
    assert kept(cost) == [F4 * n for n in expected]


def test_frozen_layers_keep_nothing_until_something_trains() -> None:
    frozen = nn.Linear(D, D).requires_grad_(False)
    plain = torch.randn(4, D)
    cost = profile([frozen, nn.ReLU(), nn.Linear(D, D)], plain)
    assert kept(cost) == [0, 0, F4 * D]
    assert cost.layers[0].backward == cost.layers[1].backward == AffineCost(fixed_s=0.0, per_sample_s=0.0)
    assert cost.layers[2].backward.seconds(8) > 0.0
    assert cost.layers[0].param_bytes == 0.0 and cost.layers[0].state_bytes == F4 * (D * D + D)
    # The same layer between trained ones hands a gradient on, for which a linear layer keeps its weight alone.
    assert kept(profile([nn.Linear(D, D), frozen], plain))[1] == 0


def test_small_models_by_hand() -> None:
    conv, norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
    layers = [conv, norm, nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5)]
    cost = profile(layers, torch.randn(2, 2, 4, 4), sizes=[2, 8])
    whole, pooled = 3 * 16 * F4, 3 * 4 * F4
    statistics = 2 * 3 * F4 / 8  # per micro-batch
    # An image; the convolution's output; the ReLU's, in place of the norm's; where the maxima are; the maxima.
    assert kept(cost) == [2 * 16 * F4, whole + statistics, whole, 3 * 4 * 8, 0, pooled]
    assert [layer.output_bytes for layer in cost.layers] == [whole, whole, whole, pooled, pooled, 5 * F4]

    words = torch.randint(0, 10, (4, 7))
    cost = profile([nn.Embedding(10, D), nn.LayerNorm(D)], words)
    assert kept(cost) == [7 * 8, 7 * (D + 2) * F4]


def test_tuples_pass_through_and_what_is_not_batched_stays_whole() -> None:
    cost = profile([Function(split, nn.Linear(D, D)), Function(join, nn.Linear(D, 2))], rows(), sizes=[2, 4])
    assert [layer.output_bytes for layer in cost.layers] == [2 * D * F4 + 3 * F4 / 4, 2 * F4]
    # Both factors and the product; the first factor's twin, x, is kept by the first layer already.
    assert kept(cost) == [D * F4, 2 * D * F4]


def test_autocast_copies_of_weights_are_kept() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        cost = profile([nn.Linear(D, D, bias=False)], rows(), sizes=[2, 4])
    assert kept(cost) == [2 * D + 2 * D * D / 4]  # the input's copy per sample, the weight's per micro-batch of 4


# ---- times ---------------------------------------------------------------------------------------------------


class Ticking(nn.Module):
    """Takes ``fixed + per_row * rows`` ticks of a timer, forward; twice that, backward."""

    def __init__(self, timer: Counting, fixed: float, per_row: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.timer, self.fixed, self.per_row = timer, fixed, per_row

    def forward(self, x: Tensor) -> Tensor:
        ticks = self.fixed + self.per_row * len(x)
        self.timer.now += ticks
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda gradient: self.tick(2 * ticks))
        return y

    def tick(self, ticks: float) -> None:
        self.timer.now += ticks


def test_forward_and_backward_are_told_apart_and_fitted_over_sizes() -> None:
    timer = Counting()
    cost = profile([Ticking(timer, 5, 3), Ticking(timer, 7, 0)], rows(), sizes=[2, 4, 16], timer=timer)
    for layer, (fixed, slope) in zip(cost.layers, [(5, 3), (7, 0)], strict=True):
        for part, factor in ((layer.forward, 1), (layer.backward, 2)):
            assert (part.fixed_s, part.per_sample_s) == pytest.approx((factor * fixed, factor * slope), abs=1e-9)


def test_equal_layers_are_timed_once() -> None:
    timer = Counting()
    twins = [nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)]
    cost = profile(twins, rows(), timer=timer)
    assert timer.marks == 2 * 3 * 2  # two sizes, three marks, two different layers
    assert cost.layers[0].forward == cost.layers[1].forward
    assert [layer.param_bytes for layer in cost.layers] == [BYTES, BYTES, F4 * D * D]


def test_gradients_are_none_afterwards() -> None:
    layer, x = nn.Linear(D, D), rows()
    profile([layer], x)
    assert layer.weight.grad is None and x.grad is None and x.requires_grad


def test_the_layers_see_each_size_and_gradients_as_in_training() -> None:
    seen: list[tuple[int, bool, bool]] = []

    class Spy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append((len(input), input.requires_grad, torch.is_grad_enabled()))
            return super().forward(input)

    with torch.no_grad():
        profile([Spy(D, D), Spy(D, D)], torch.randn(3, D), sizes=[2, 5])
    assert {(n, grad) for n, _, grad in seen} == {(2, True), (5, True)}
    assert [needs for _, needs, _ in seen].count(False) == 4  # the first layer, observed and timed, at two sizes


# ---- errors ----------------------------------------------------------------------------------------------------


def fails_with_many(inner: nn.Module, x: Tensor) -> Tensor:
    if len(x) > 4:
        raise torch.OutOfMemoryError("no more")
    return x


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"layer '1' fails .* shapes cannot be multiplied"):
        profile([nn.Linear(D, D), nn.Linear(D + 1, D)], rows())
    with pytest.raises(torch.OutOfMemoryError, match="layer '0' does not fit with 8 samples: profile smaller"):
        profile([Function(fails_with_many)], rows(), sizes=[2, 8])


# ---- equal layers ----------------------------------------------------------------------------------------------


class Windowed(nn.Module):
    def __init__(self, window: Any) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        return 1.0 * x


def pair(*, tied: bool) -> nn.Module:
    one, other = nn.Linear(D, D), nn.Linear(D, D)
    if tied:
        other.weight = one.weight
    return nn.Sequential(one, other)


OBJECT = Counting()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (nn.Linear(D, D), nn.Linear(D, D), True),
        (nn.Linear(D, D), nn.Linear(D, D, bias=False), False),
        (nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False), False),
        (nn.Dropout(0.1), nn.Dropout(0.2), False),
        (nn.Dropout(0.1), nn.Dropout(0.1).eval(), False),
        (Windowed(3), Windowed(4), False),
        (Windowed({"a": [1, None]}), Windowed({"a": [1, None]}), True),
        (Windowed(OBJECT), Windowed(OBJECT), True),
        (Windowed(F.relu), Windowed(F.gelu), False),
        (Windowed(lambda: 1), Windowed(lambda: 1), False),
        (Windowed(torch.zeros(2)), Windowed(torch.ones(2)), True),
        (Windowed(torch.zeros(2)), Windowed(torch.zeros(3)), False),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU()), False),
        (pair(tied=True), pair(tied=False), False),
    ],
)
def test_layers_are_told_apart_by_what_they_do(a: nn.Module, b: nn.Module, same: bool) -> None:
    timer = Counting()
    profile([a, b], rows(), timer=timer)
    assert timer.marks == 2 * 3 * (1 if same else 2)
