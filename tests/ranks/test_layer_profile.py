"""The layer profile: bytes against numbers worked out by hand, times only by their structure, and no trace left.

A single process. No test asks for a certain time: stamps are counted by a clock of the tests' own where order matters.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetero.cluster.timer import Timer
from lightning_hetero.pipeline.footprint import optimizer_bytes, state_bytes, trained_bytes
from lightning_hetero.pipeline.profile import estimate_on_meta, profile_key, profile_on_device
from lightning_hetero.pipeline.structure import structure_of
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

D = 6  # features
F4 = 4  # bytes of a float32
CPU = torch.device("cpu")
HOST = Timer(CPU)


def profile(layers: Sequence[nn.Module], example: Any, **settings: Any) -> ModelCost:
    return profile_on_device(layers, example, **{"repeats": 1, "warm_ups": 0, **settings})


def on_meta(layers: Sequence[nn.Module], example: Any, **settings: Any) -> ModelCost:
    return estimate_on_meta(layers, example, **{"flops_per_s": 1e9, **settings})


def kept(cost: ModelCost) -> list[float]:
    return [layer.activation_bytes for layer in cost.layers]


def rows(n: int = 4, d: int = D) -> Tensor:
    return torch.randn(n, d, requires_grad=True)


class Function(nn.Module):
    """A module from a plain function of this file."""

    def __init__(self, function: Callable[..., Any], *inner: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.Sequential(*inner)

    def forward(self, value: Any) -> Any:
        return self.function(self.inner, value)


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

BOTH = pytest.mark.parametrize("measure", [profile, on_meta])


@BOTH
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
def test_activations_are_what_autograd_keeps(
    measure: Callable[..., ModelCost], layers: list[nn.Module], expected: list[int]
) -> None:
    cost = measure(layers, rows(), micro_samples=[2, 4])
    assert kept(cost) == [F4 * n for n in expected]


@BOTH
def test_frozen_layers_keep_nothing_until_something_trains(measure: Callable[..., ModelCost]) -> None:
    frozen = nn.Linear(D, D).requires_grad_(False)
    plain = torch.randn(4, D)
    cost = measure([frozen, nn.ReLU(), nn.Linear(D, D)], plain, optimizer=optim.Adam)
    assert kept(cost) == [0, 0, F4 * D]
    assert cost.layers[0].backward == cost.layers[1].backward == AffineCost(fixed_s=0.0, per_sample_s=0.0)
    assert cost.layers[2].backward.seconds(8) > 0.0
    assert cost.layers[0].param_bytes == 0.0 and cost.layers[0].state_bytes == F4 * (D * D + D)
    # The same layer between trained ones hands a gradient on, for which a linear layer keeps its weight alone.
    assert kept(measure([nn.Linear(D, D), frozen], plain))[1] == 0


@BOTH
def test_small_models_by_hand(measure: Callable[..., ModelCost]) -> None:
    conv, norm = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)
    layers = [conv, norm, nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 5)]
    cost = measure(layers, torch.randn(2, 2, 4, 4), micro_samples=[2, 8])
    whole, pooled = 3 * 16 * F4, 3 * 4 * F4
    statistics = 2 * 3 * F4 / 8  # per micro-batch
    # An image; the convolution's output; the ReLU's, in place of the norm's; where the maxima are; the maxima.
    assert kept(cost) == [2 * 16 * F4, whole + statistics, whole, 3 * 4 * 8, 0, pooled]
    assert [layer.output_bytes for layer in cost.layers] == [whole, whole, whole, pooled, pooled, 5 * F4]
    assert cost.before.output_bytes == 2 * 16 * F4

    words = torch.randint(0, 10, (4, 7))
    cost = measure([nn.Embedding(10, D), nn.LayerNorm(D)], words)
    assert kept(cost) == [7 * 8, 7 * (D + 2) * F4] and cost.before.output_bytes == 7 * 8


@BOTH
def test_tuples_pass_through_and_what_is_not_batched_stays_whole(measure: Callable[..., ModelCost]) -> None:
    cost = measure([Function(split, nn.Linear(D, D)), Function(join, nn.Linear(D, 2))], rows(), micro_samples=[2, 4])
    assert [layer.output_bytes for layer in cost.layers] == [2 * D * F4 + 3 * F4 / 4, 2 * F4]
    # Both factors and the product; the first factor's twin, x, is kept by the first layer already.
    assert kept(cost) == [D * F4, 2 * D * F4]


@BOTH
def test_half_precision_keeps_half(measure: Callable[..., ModelCost]) -> None:
    x = rows().detach().bfloat16().requires_grad_()
    cost = measure([nn.Linear(D, D).bfloat16()], x)
    assert kept(cost) == [D * 2] and cost.layers[0].param_bytes == 2 * (D * D + D)


def test_autocast_copies_of_weights_are_kept() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        cost = profile([nn.Linear(D, D, bias=False)], rows(), micro_samples=[2, 4])
    assert kept(cost) == [2 * D + 2 * D * D / 4]  # the input's copy per sample, the weight's per micro-batch of 4


# ---- state ---------------------------------------------------------------------------------------------------

BYTES = F4 * (D * D + D)  # of nn.Linear(D, D)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (None, 0),
        (optim.SGD, 0),
        (lambda ps: optim.SGD(ps, lr=0.1), 0),
        (lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9), 1),
        (optim.Adam, 2),
        (lambda ps: optim.AdamW(ps), 2),
        (lambda ps: optim.AdamW(ps, amsgrad=True), 3),
        (lambda ps: optim.RMSprop(ps, momentum=0.5, centered=True), 3),
        (lambda ps: optim.Adagrad(ps), 1),
        (optim.Adadelta, 2),
        (lambda ps: 5.0, None),
    ],
)
def test_optimizer_state_estimated_and_measured(optimizer: Any, copies: int | None) -> None:
    parameters = list(nn.Linear(D, D).parameters())
    assert optimizer_bytes(parameters, optimizer) == (5.0 if copies is None else copies * BYTES)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.SGD(ps, lr=0.1),
        lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: optim.Adam(ps),
        lambda ps: optim.Adam(ps, amsgrad=True),
        lambda ps: optim.NAdam(ps),
        lambda ps: optim.RAdam(ps),
        lambda ps: optim.Adamax(ps),
        lambda ps: optim.Adagrad(ps),
        lambda ps: optim.Adadelta(ps),
        lambda ps: optim.ASGD(ps),
        lambda ps: optim.Rprop(ps),
        lambda ps: optim.RMSprop(ps),
        lambda ps: optim.RMSprop(ps, momentum=0.9, centered=True),
    ],
)
def test_what_is_estimated_of_an_instance_is_what_a_step_makes(make: Callable[..., optim.Optimizer]) -> None:
    parameters = list(nn.Linear(D, D).parameters())
    assert optimizer_bytes(parameters, make(parameters)) == optimizer_bytes(parameters, make)


def test_settings_count_per_group_and_strangers_cost_nothing() -> None:
    a, b, c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
    groups = [{"params": a.parameters(), "momentum": 0.9}, {"params": b.parameters()}]
    optimizer = optim.SGD(groups, lr=0.1)
    assert [optimizer_bytes(list(m.parameters()), optimizer) for m in (a, b, c)] == [BYTES, 0.0, 0.0]


def test_an_unknown_optimizer_is_refused_and_can_be_measured() -> None:
    parameters = list(nn.Linear(D, D).parameters())
    with pytest.raises(ValueError, match=r"Adafactor keeps is not known .* optimizer=lambda parameters"):
        optimizer_bytes(parameters, optim.Adafactor)
    assert 0 < optimizer_bytes(parameters, lambda ps: optim.Adafactor(ps)) < BYTES  # factors of the weight's moments
    with pytest.raises(ValueError, match="optimizer='adam' must be an optimizer, a class"):
        optimizer_bytes(parameters, "adam")  # pyright: ignore[reportArgumentType]

    class Mine(optim.AdamW):
        """Derived ones are as their base."""

    assert optimizer_bytes(parameters, Mine) == 2 * BYTES


def test_parameters_gradients_buffers_and_ties() -> None:
    layer = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))
    layer[2].weight = layer[0].weight  # pyright: ignore
    trained = BYTES + D * F4 + 2 * D * F4
    buffers = 2 * D * F4 + 8
    assert trained_bytes(layer) == trained
    assert state_bytes(layer, optim.Adam) == 4 * trained + buffers
    layer[0].requires_grad_(False)
    assert trained_bytes(layer) == 3 * D * F4
    assert state_bytes(layer, optim.Adam) == BYTES + 4 * 3 * D * F4 + buffers


# ---- times ---------------------------------------------------------------------------------------------------


def test_times_are_not_negative_and_more_work_takes_longer() -> None:
    layers = [nn.Linear(32, 32), nn.Linear(32, 2048), nn.Linear(2048, 32)]
    cost = profile(layers, rows(64, 32), repeats=5, warm_ups=2)
    for layer in cost.layers:
        assert min(layer.forward.seconds(0), layer.forward.per_sample_s) >= 0.0
        assert 0.0 < layer.backward.seconds(64) < math.inf
    small, large = (layer.forward.seconds(64) + layer.backward.seconds(64) for layer in cost.layers[:2])
    assert small < large
    assert [layer.name for layer in cost.layers] == ["0", "1", "2"]


class Counting(Timer):
    """Says that every sample of every call takes a second, and counts the calls that were timed."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.marks, self.now = 0, 0.0

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start


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
    cost = profile([Ticking(timer, 5, 3), Ticking(timer, 7, 0)], rows(), micro_samples=[2, 4, 16], timer=timer)
    for layer, (fixed, slope) in zip(cost.layers, [(5, 3), (7, 0)], strict=True):
        for part, factor in ((layer.forward, 1), (layer.backward, 2)):
            assert (part.fixed_s, part.per_sample_s) == pytest.approx((factor * fixed, factor * slope), abs=1e-9)


def test_warm_ups_do_not_count_and_the_median_does() -> None:
    timer = Counting()

    class Warming(Ticking):
        def forward(self, x: Tensor) -> Tensor:
            self.fixed = next(self.series)
            return super().forward(x)

    layer = Warming(timer, 0, 0)
    # Per size: observed, two warm-ups, three repeats.
    layer.series = iter([0, 900, 800, 5, 6, 700] * 2)  # pyright: ignore
    cost = profile([layer], rows(), warm_ups=2, repeats=3, timer=timer)
    assert cost.layers[0].forward.seconds(4) == pytest.approx(6.0)


def test_equal_layers_are_timed_once() -> None:
    timer = Counting()
    twins = [nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)]
    cost = profile(twins, rows(), timer=timer)
    assert timer.marks == 2 * 3 * 2  # two sizes, three marks, two different layers
    assert cost.layers[0].forward == cost.layers[1].forward
    assert [layer.param_bytes for layer in cost.layers] == [BYTES, BYTES, F4 * D * D]


def test_the_layers_see_each_size_and_gradients_as_in_training() -> None:
    seen: list[tuple[int, bool, bool]] = []

    class Spy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append((len(input), input.requires_grad, torch.is_grad_enabled()))
            return super().forward(input)

    with torch.no_grad():
        profile([Spy(D, D), Spy(D, D)], torch.randn(3, D), micro_samples=[2, 5])
    assert {(n, grad) for n, _, grad in seen} == {(2, True), (5, True)}
    assert [needs for _, needs, _ in seen].count(False) == 4  # the first layer, observed and timed, at two sizes


# ---- no trace ------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """Draws from every generator there is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + random.random() + np.random.rand()


@pytest.mark.parametrize("measure", [profile, on_meta, lambda *a: profile(*a, cache_folder="kept")])
def test_nothing_is_left_behind(measure: Callable[..., ModelCost]) -> None:
    class Recurrent(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
            return super().forward(x)[0]

    layers = [nn.BatchNorm1d(D), nn.Dropout(0.5), Drawing(), Recurrent(D, D), nn.Linear(D, D)]
    model = nn.Sequential(*layers).train()
    layers[4].weight.grad = torch.full((D, D), 3.0)  # pyright: ignore
    hooked: list[int] = []
    layers[4].weight.register_hook(lambda gradient: hooked.append(1))  # pyright: ignore
    layers[4].bias.register_post_accumulate_grad_hook(lambda p: hooked.append(2))  # pyright: ignore
    before = {name: (id(t), t.clone(), t.grad) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    modes = [module.training for module in model.modules()]
    x = rows()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore

    measure(layers, x)

    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # pyright: ignore
    after = {name: (id(t), t, t.grad) for name, t in [*model.named_parameters(), *model.named_buffers()]}
    for name, (identity, value, grad) in before.items():
        assert after[name][0] == identity and torch.equal(after[name][1], value), name
        assert after[name][2] is grad, name
    assert torch.equal(layers[4].weight.grad, torch.full((D, D), 3.0))  # pyright: ignore
    assert modes == [module.training for module in model.modules()] and hooked == []
    assert x.grad is None and x.requires_grad and torch.is_grad_enabled()


# ---- meta ----------------------------------------------------------------------------------------------------


def test_flops_become_seconds_by_hand() -> None:
    cost = on_meta([nn.Linear(D, 2 * D), nn.ReLU(), nn.Linear(2 * D, D)], torch.randn(4, D), flops_per_s=1e3)
    first, relu, second = cost.layers
    product = 2 * D * 2 * D / 1e3  # FLOPs per sample
    assert (first.forward.fixed_s, first.forward.per_sample_s) == pytest.approx((0.0, product), abs=1e-9)
    assert first.backward.per_sample_s == pytest.approx(product)  # the input needs no gradient
    assert second.backward.per_sample_s == pytest.approx(2 * product)
    assert relu.forward.per_sample_s == relu.backward.per_sample_s == 0.0


def test_traffic_counts_where_a_rate_is_given() -> None:
    cost = on_meta([nn.ReLU(), nn.Linear(D, D)], rows(), flops_per_s=math.inf, bytes_per_s=1.0)
    relu, linear = cost.layers
    moved = 2 * D * F4
    assert (relu.forward.fixed_s, relu.forward.per_sample_s) == pytest.approx((0.0, moved), abs=1e-6)
    assert (linear.forward.fixed_s, linear.forward.per_sample_s) == pytest.approx((BYTES, moved))
    assert (linear.backward.fixed_s, linear.backward.per_sample_s) == pytest.approx((2 * BYTES, 2 * moved))


def test_a_model_larger_than_any_memory_is_planned_on_meta() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(1 << 20, 1 << 20) for _ in range(3)]
        example = torch.empty(2, 1 << 20)
    cost = on_meta(layers, example, optimizer=optim.Adam, flops_per_s=1e15)
    assert cost.layers[0].param_bytes == F4 * (2**40 + 2**20)
    assert cost.layers[0].state_bytes == 4 * cost.layers[0].param_bytes
    assert cost.layers[1].forward.per_sample_s == pytest.approx(2**41 / 1e15)


def attention(inner: nn.Module, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_attention_and_recomputation_are_counted() -> None:
    x = torch.randn(2, 2, 8, D, requires_grad=True)
    (plain,) = on_meta([Function(attention)], x, flops_per_s=1.0).layers
    assert plain.forward.per_sample_s == pytest.approx(2 * (2 * 2 * 8 * 8 * D))  # queries by keys, weights by values
    inner = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    once = on_meta([inner], rows(), flops_per_s=1.0).layers[0]
    twice = on_meta([Function(without_reentrant, inner)], rows(), flops_per_s=1.0).layers[0]
    assert twice.forward.per_sample_s == once.forward.per_sample_s
    assert twice.backward.per_sample_s == pytest.approx(once.backward.per_sample_s + once.forward.per_sample_s)


def needs_values(inner: nn.Module, x: Tensor) -> Tensor:
    return x if float(x.sum()) > 0 else -x


def fails_with_many(inner: nn.Module, x: Tensor) -> Tensor:
    if len(x) > 4:
        raise torch.OutOfMemoryError("no more")
    return x


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"layer 'blocks\.1' fails with 2 samples"):
        on_meta([nn.ReLU(), Function(needs_values)], rows(), names=["blocks.0", "blocks.1"])
    with pytest.raises(RuntimeError, match=r"layer '1' fails .* shapes cannot be multiplied"):
        profile([nn.Linear(D, D), nn.Linear(D + 1, D)], rows())
    with pytest.raises(torch.OutOfMemoryError, match="layer '0' does not fit with 8 samples: profile smaller"):
        profile([Function(fails_with_many)], rows())


# ---- what is given, and kept -----------------------------------------------------------------------------------


def test_costs_around_the_backbone_are_the_callers() -> None:
    time = AffineCost(fixed_s=1.0, per_sample_s=2.0)
    mine = LayerCost(name="embed", forward=time, backward=time)
    cost = profile([nn.ReLU()], rows(), before=mine, head=replace(mine, name="loss"), names=["relu"])
    assert cost.before is mine and cost.head.name == "loss" and cost.layers[0].name == "relu"
    bare = profile([nn.ReLU()], rows())
    assert bare.before.output_bytes == D * F4 and bare.before.forward.seconds(9) == bare.head.backward.seconds(9) == 0.0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layers": []}, ValueError, "layers is empty"),
        ({"names": ["a", "b"]}, ValueError, "names=['a', 'b'] must be one per layer: there are 1 layers"),
        ({"micro_samples": [4]}, ValueError, "micro_samples=[4] must be two or more different sizes"),
        ({"micro_samples": [0, 4]}, ValueError, "micro_samples=[0, 4] must be"),
        ({"example": torch.tensor(1.0)}, TypeError, "example is a Tensor without a tensor whose first dimension"),
        ({"example": (3, "x")}, TypeError, "example is a tuple without"),
        ({"repeats": 0}, ValueError, "repeats=0 must be >= 1"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        profile_on_device(**{"layers": [nn.ReLU()], "example": rows(), **change})
    with pytest.raises(ValueError, match=re.escape("flops_per_s=0 must be > 0")):
        on_meta([nn.ReLU()], rows(), flops_per_s=0)


def test_a_profile_is_kept_by_structure(tmp_path: Path) -> None:
    timer = Counting()

    def marks(layers: Sequence[nn.Module], x: Tensor | None = None, **settings: Any) -> int:
        before = timer.marks
        profile(layers, rows() if x is None else x, cache_folder=tmp_path, timer=timer, **settings)
        return timer.marks - before

    assert marks([nn.Linear(D, D), nn.ReLU()]) > 0
    assert marks([nn.Linear(D, D), nn.ReLU()]) == 0  # other weights
    assert marks([nn.Linear(D, D), nn.ReLU()], optimizer=optim.Adam) == 0
    again = profile([nn.Linear(D, D), nn.ReLU()], rows(), cache_folder=tmp_path, optimizer=optim.Adam)
    assert [layer.state_bytes for layer in again.layers] == [4 * BYTES, 0.0]
    for other in (
        lambda: marks([nn.Linear(D, D), nn.GELU()]),
        lambda: marks([nn.Linear(D, 2 * D), nn.ReLU()]),
        lambda: marks([nn.Linear(D, D).eval(), nn.ReLU()]),
        lambda: marks([nn.Linear(D, D).requires_grad_(False), nn.ReLU()]),
        lambda: marks([nn.Linear(D, D), nn.ReLU()], rows(8)),
        lambda: marks([nn.Linear(D, D), nn.ReLU()], micro_samples=[1, 2]),
        lambda: marks([nn.Linear(D, D), nn.ReLU()], names=["a", "b"]),
    ):
        assert other() > 0
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("forward", "foreword"))
    assert marks([nn.Linear(D, D), nn.ReLU()]) > 0  # what another version wrote


def test_the_key_follows_autocast() -> None:
    layers, x = [nn.Linear(D, D)], rows()
    plain = profile_key(layers, x, micro_samples=[1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert profile_key(layers, x, micro_samples=[1, 2]) != plain


class Settings:
    def __init__(self, width: int) -> None:
        self.width = width


class Windowed(nn.Module):
    def __init__(self, window: Any) -> None:
        super().__init__()
        self.window = window


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 3), True),
        (nn.Linear(2, 3), nn.Linear(3, 2), False),
        (nn.Dropout(0.1), nn.Dropout(0.2), False),
        (Windowed(3), Windowed(4), False),
        (Windowed({"a": [1, None]}), Windowed({"a": [1, None]}), True),
        (Windowed({1, 2}), Windowed({2, 1}), True),
        (Windowed(Settings(3)), Windowed(Settings(3)), True),
        (Windowed(Settings(3)), Windowed(Settings(4)), False),
        (Windowed(F.relu), Windowed(F.gelu), False),
        (Windowed(torch.zeros(2)), Windowed(torch.ones(2)), True),
        (Windowed(torch.zeros(2)), Windowed(torch.zeros(3)), False),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU()), False),
    ],
)
def test_structure_tells_layers_apart_by_what_they_do(a: nn.Module, b: nn.Module, same: bool) -> None:
    assert (structure_of(a) == structure_of(b)) is same
    assert (structure_of(a, exact=True) == structure_of(b, exact=True)) is same


def test_what_cannot_be_read_is_the_same_only_if_it_is_the_same_object() -> None:
    one, other = (lambda: 1), (lambda: 2)
    assert structure_of(Windowed(one)) == structure_of(Windowed(other))
    assert structure_of(Windowed(one), exact=True) != structure_of(Windowed(other), exact=True)
    assert structure_of(Windowed(one), exact=True) == structure_of(Windowed(one), exact=True)


def test_ties_are_part_of_the_structure() -> None:
    tied, free = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    tied[1].weight = tied[0].weight  # pyright: ignore
    assert structure_of(tied) != structure_of(free)
