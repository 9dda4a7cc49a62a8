"""The cut at the backbone: an unchanged ``training_step`` gets the gradients of a direct run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.step.cut import BackboneCall, BackboneCut, graphs_to_retain
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from lightning_hetero.pipeline.runtime.step.resumable import Suspended
from tests.ranks.pipeline.cut_kit import (
    Autocast,
    Checkpoints,
    D,
    InPlace,
    Nested,
    Net,
    Skip,
    SkipOfLeaf,
    Stage,
    Twice,
    TwoWithoutLink,
    assert_same,
    batches,
    direct,
    gradients,
    piped,
)
from tests.ranks.pipeline.resumable_kit import resumable

NETS = [Net, Skip, SkipOfLeaf, InPlace, Twice, TwoWithoutLink, Nested, Autocast, Checkpoints]


@pytest.mark.parametrize("make", NETS)
def test_gradients_equal_a_direct_run(carrier: ExitStack, make: type[Net]) -> None:
    """Bit by bit; to 1e-12 where gradients are summed in another order, since a graph is walked in two goes."""
    expected_net, net = make(), make()
    data = batches(net)
    expected = direct(expected_net, data)
    losses = piped(net, data, carrier)
    assert_same(losses, expected)
    exactly = make not in (Skip, Twice, TwoWithoutLink)
    for name, grad in gradients(expected_net).items():
        got = gradients(net)[name]
        assert (got is None) == (grad is None), name
        if grad is not None:
            assert_same(got, grad, exactly)
    assert net.training_step(data[0]).grad_fn is not None  # and it runs without steps again


def test_the_callers_autocast_is_in_force_in_interleaved_steps(carrier: ExitStack) -> None:
    class Mixed(Net):
        dtype = torch.float32

    expected_net, net = Mixed(), Mixed()
    data = batches(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = piped(net, data, carrier)
    for k, batch in enumerate(data):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = expected_net.training_step(batch)
        loss.backward()
        assert_same(losses[k], loss.detach())
    assert_same(gradients(net), gradients(expected_net))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Net, [False, False]),
        (Skip, [True, False]),
        (SkipOfLeaf, [False, False]),
        (TwoWithoutLink, [False, False, False]),
        (Twice, [False, True, False]),
    ],
)
def test_a_graph_is_retained_only_where_it_is_walked_again(make: type[Net], expected: list[bool]) -> None:
    """A compiled graph that gives its buffers away refuses ``retain_graph``."""
    net = make()
    calls: list[BackboneCall] = []
    with ExitStack() as carrier, net.cut():
        step = resumable(carrier, lambda: net.training_step(batches(net)[0]), 0)
        outcome = step.start()
        stage = Stage(net)
        while isinstance(outcome, Suspended):
            calls.append(outcome.value)
            outcome = step.resume(stage.reply(outcome.value))
    assert graphs_to_retain(outcome.value, calls) == expected


# ---- what is replaced, and for how long ------------------------------------------------------------------------


@pytest.mark.parametrize("own", [None, lambda x: x * 2])
def test_forward_is_the_original_after_the_cut_also_after_an_exception(own: Any) -> None:
    net = Net()
    if own is not None:
        net.backbone.forward = own
    before, cut = dict(vars(net.backbone)), net.cut()
    replaced = []
    for _ in range(2):
        with pytest.raises(KeyError), cut:
            replaced.append(net.backbone.forward)
            assert replaced[0] is replaced[-1] is not own
            assert own is None or net.backbone(torch.ones(1)).item() == 2.0  # outside of steps
            raise KeyError
        assert vars(net.backbone) == before


def test_hooks_run_in_the_step_and_those_of_layers_where_they_are_computed(carrier: ExitStack) -> None:
    net = Net()
    seen: list[str] = []
    net.backbone.register_forward_pre_hook(lambda m, args: seen.append("before backbone"))
    net.backbone.register_forward_hook(lambda m, args, y: seen.append("after backbone") or y * 0 + 1)
    net.backbone[0].register_forward_hook(lambda *_: seen.append("layer"))  # type: ignore[index]
    net.head.register_forward_hook(lambda *_: seen.append("head"))
    layers = nn.Sequential(*net.backbone)  # type: ignore[arg-type]
    with net.cut():
        step = resumable(carrier, lambda: net.training_step(batches(net)[0]), 0)
        call = step.start().value
        seen.append("suspended")
        done = step.resume(call.reply(layers(*call.inputs)))
    assert seen == ["before backbone", "suspended", "layer", "after backbone", "head"]
    assert_same(done.value, net.head(torch.ones(3, D, dtype=net.dtype)).square().mean())


# torch hides this warning of its own, but not where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_step_is_split_at_the_call(carrier: ExitStack) -> None:
    expected_net, net = Net(), Net()
    data = batches(net)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    step = torch.compile(net.training_step, backend=backend, dynamic=True)
    expected = direct(expected_net, data)
    with torch.no_grad():
        plain = [step(batch) for batch in data]  # compiled whole, without the cut
    assert_same(plain, expected)
    seen = [graphs]
    cut = net.cut()
    net.cut = lambda: cut  # type: ignore[method-assign]
    for _ in range(3):
        net.zero_grad()
        assert_same(piped(net, data, carrier, step), expected)
        assert_same(gradients(net), gradients(expected_net))
        seen.append(graphs)
    with torch.no_grad():
        assert_same([step(batch) for batch in data], expected)  # and whole again
    assert seen[0] == 1 and seen[1] >= 3  # two more: before the call and behind it
    assert seen[1] == seen[2] == seen[3] == graphs  # and none for the same cut entered again


# ---- layers that the step calls one after another --------------------------------------------------------------


def _collects(layers: nn.ModuleList, x: Tensor) -> Tensor:
    features = []
    for layer in layers:
        features.append(x := layer(x))
    return torch.cat(features)


def _between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x) + x
    return x


def _shape(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[2](layers[1](layers[0](x))[:, :1])


def _attribute(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[1](layers[0](x).relu())


def _order(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[1](layers[2](layers[0](x)))


def _another(layers: nn.ModuleList, x: Tensor) -> Tensor:
    layers[0](x)
    return layers[1](x)


def _skipping(layers: nn.ModuleList, x: Tensor) -> Tensor:
    y = layers[0](x)
    return layers[2](layers[1](y), y)


def _opaque(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[2](layers[1](layers[0](x), object()))


@pytest.mark.parametrize(
    ("walk", "error", "named"),
    [
        (_collects, NotAChainError, "output of layer 0 .* move what uses it there"),
        (_between, NotAChainError, "output of layer 0 .* move what uses it there"),
        (_shape, NotAChainError, "output of layer 1 .* move what uses it there"),
        (_attribute, AttributeError, "no 'relu': the output of layer 0"),
        (_order, NotAChainError, "layer 2 .* something else than the output of layer 1"),
        (_another, NotAChainError, "layer 1 .* something else than the output of layer 0"),
        (_skipping, NotAChainError, "layer 2 .* something else than the output of layer 1"),
        (_opaque, NotAChainError, "layer 1 .* called with argument 1, a object, which cannot travel"),
    ],
)
def test_a_walk_that_is_no_chain_is_refused(
    carrier: ExitStack, walk: Callable[[nn.ModuleList, Tensor], Tensor], error: type[Exception], named: str
) -> None:
    layers = nn.ModuleList([nn.Identity() for _ in range(3)])

    def body() -> Tensor:
        return walk(layers, torch.ones(1, 2))

    with BackboneCut(*layers), pytest.raises(error, match=named):
        step = resumable(carrier, body, 0)
        outcome = step.start()
        while isinstance(outcome, Suspended):
            outcome = step.resume(outcome.value.reply(torch.ones(1, 2)))
