"""Which layers are found under which name, where the step is cut for them, and what is refused with which reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.step.backbone import Backbone, find_backbone
from lightning_hetero.pipeline.runtime.step.resumable import Done, Suspended
from tests.ranks.pipeline.resumable_kit import resumable


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=torch.float64)


class Chain(nn.Module):
    """Calls its children one after another, some in a loop, one only in name different by mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Tanh(), nn.Sequential(linear()))
        self.blocks = nn.ModuleList([linear() for _ in range(2)])
        self.unused = linear()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Own(nn.Module):
    """Not seen through by itself: code between the layers. It says which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleDict({"a": linear(), "b": nn.Sequential(linear(), nn.Tanh())})

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for item in self.items.values():
            x = item(x)
        return x.sin()

    def pipeline_layers(self) -> Any:
        return list(self.items.values())


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()), nn.Sequential())
        self.chain = Chain()
        self.layers = nn.ModuleList([nn.Sequential(linear(), nn.ReLU()), linear()])
        self.own = Own()

    def forward(self, x: Tensor) -> Tensor:
        x = self.chain(self.front(x))
        for layer in self.layers:
            x = layer(x)
        return self.own(x)


FOUND: dict[str, tuple[Any, list[str], list[str]]] = {
    "a Sequential, opened": ("front", ["front.0", "front.1.0", "front.1.1", "front.2"], ["front"]),
    "a chain": ("chain", ["chain.blocks.0", "chain.blocks.1", "chain.last.0", "chain.last.1.0"], ["chain"]),
    "a list": ("layers", ["layers.0.0", "layers.0.1", "layers.1"], ["layers.0", "layers.1"]),
    "a list within": ("chain.blocks", ["chain.blocks.0", "chain.blocks.1"], ["chain.blocks.0", "chain.blocks.1"]),
    "its own layers, whole": ("own", ["own.items.a", "own.items.b"], ["own.items.a", "own.items.b"]),
    "several": (
        ["layers", "own"],
        ["layers.0.0", "layers.0.1", "layers.1", "own.items.a", "own.items.b"],
        ["layers.0", "layers.1", "own.items.a", "own.items.b"],
    ),
    "the usual name": (None, ["layers.0.0", "layers.0.1", "layers.1"], ["layers.0", "layers.1"]),
}


def computed(layers: tuple[nn.Module, ...], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


@pytest.mark.parametrize("case", [case for case in FOUND if case != "several"])
def test_layers_computed_elsewhere_are_the_module(case: str) -> None:
    backbone, names, cut = FOUND[case]
    torch.manual_seed(3)
    module = Whole()
    found = find_backbone(module, backbone)
    assert list(found.names) == names and [module.get_submodule(n) for n in names] == list(found.layers)
    assert [module.get_submodule(n) for n in cut] == list(found.cut_modules)
    x = torch.randn(2, 3, dtype=torch.float64)
    expected, carrier = module(x), ExitStack()
    with found.cut():
        step = resumable(carrier, lambda: module(x), 0)
        match step.start():
            case Suspended(value=call):
                done = step.resume(call.reply(computed(found.layers, *call.inputs)))
                assert isinstance(done, Done) and torch.equal(done.value, expected)
            case other:
                raise AssertionError(other)
    carrier.close()


def test_several_names_are_layers_in_order() -> None:
    backbone, names, cut = FOUND["several"]
    found = find_backbone(module := Whole(), backbone)
    assert list(found.names) == names and [module.get_submodule(n) for n in cut] == list(found.cut_modules)


def test_the_modules_own_layers_come_before_usual_names() -> None:
    class Says(Whole):
        def pipeline_layers(self) -> Any:
            return self.front

    assert find_backbone(Says(), None).names == ("front.0", "front.1", "front.2")
    assert find_backbone(Says(), "layers").names[0] == "layers.0.0"


# ---- refusals --------------------------------------------------------------------------------------------------


class Made(nn.Module):
    """A forward made of a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a, self.b, self.scale = linear(), linear(), nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.does = forward

    def forward(self, x: Any) -> Any:
        return self.does(self, x)


CHAINS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a function": (lambda m, x: m.b(torch.relu(m.a(x))), "calls relu besides its children"),
    "an operator": (lambda m, x: m.b(m.a(x)) + 1, "calls add besides"),
    "a method": (lambda m, x: m.b(m.a(x).flatten(1)), "calls flatten besides"),
    "a skip": (lambda m, x: m.b(m.a(x)) + x, "calls add"),
    "a parameter": (lambda m, x: m.a(x) * m.scale, r"uses 'scale'|calls mul"),
    "twice": (lambda m, x: m.a(m.a(x)), "calls 'a' twice"),
    "another input": (lambda m, x: (m.a(x), m.b(x))[1], "something else than what the layer before"),
    "another output": (lambda m, x: (m.b(m.a(x)),), "returns something else"),
    "nothing": (lambda m, x: x, "returns something else"),
    "a decision": (lambda m, x: m.a(x) if x.sum() > 0 else m.b(x), "calls sum|cannot be followed"),
    "a mode": (lambda m, x: m.b(m.a(x)) if m.training else m.a(x), r"in training and \['a'\] in evaluation"),
}


@pytest.mark.parametrize("case", CHAINS)
def test_a_forward_that_is_no_chain_is_refused_with_its_reason(case: str) -> None:
    forward, reason = CHAINS[case]
    module = Whole()
    module.chain = Made(forward)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=reason) as caught:
        find_backbone(module, "chain")
    assert "backbone='chain'" in str(caught.value)
    assert module.chain.training


def lazily(module: Whole) -> None:
    module.layers[1] = nn.LazyLinear(3)


def shared(module: Whole) -> None:
    module.layers.append(module.layers[1])


def hooked(module: Whole) -> None:
    module.layers[0].register_forward_hook(lambda *_: None)


def replaced(module: Whole) -> None:
    module.chain.forward = lambda x: x  # type: ignore[method-assign]


def emptied(module: Whole) -> None:
    module.layers = nn.ModuleList()


def says(*layers: Any) -> Callable[[Whole], None]:
    return lambda module: module.__dict__.update(pipeline_layers=lambda: list(layers))


@pytest.mark.parametrize(
    ("change", "backbone", "error", "reason"),
    [
        (None, "layer", ValueError, "has no attribute 'layer'; did you mean 'layers'"),
        (None, "own.item", ValueError, "Own at 'own' has no attribute 'item'; did you mean 'items'"),
        (None, "front.0", TypeError, "is a Linear, which has no layers"),
        (None, "front.0.weight", TypeError, "is a Parameter"),
        (None, 3, TypeError, "backbone=3 must be the path"),
        (None, ["front", "front.0"], ValueError, r"are one module, 'front.0'"),
        (None, ["chain", "chain.blocks"], ValueError, r"'chain.blocks.0' of the backbone is part of layer 'chain'"),
        (None, [], ValueError, "has no layers"),
        (emptied, "layers", ValueError, "has no layers"),
        (lazily, "layers", ValueError, "lazy parameters"),
        (shared, "layers", ValueError, "layers 2 and 3 .* one module, 'layers.1'"),
        (hooked, "layers", ValueError, "'layers.0' of the backbone has forward_hooks"),
        (replaced, "chain", TypeError, "forward of this Chain was replaced"),
        (says(linear()), None, ValueError, "a Linear, is no submodule of Whole"),
        (says("layers"), None, TypeError, r"pipeline_layers\(\) returned \['layers'\]"),
    ],
)
def test_what_cannot_be_divided_is_refused(change: Any, backbone: Any, error: Any, reason: str) -> None:
    module = Whole()
    if change is not None:
        change(module)
    with pytest.raises(error, match=reason):
        find_backbone(module, backbone)


def test_without_a_name_exactly_one_must_work() -> None:
    module = Whole()
    module.net = nn.Sequential(linear())
    with pytest.raises(TypeError, match=r"each of the attributes \['net', 'layers'\] could be it"):
        find_backbone(module, None)
    module.net, module.layers = linear(), Made(CHAINS["a function"][0])  # type: ignore[assignment]
    del module.chain  # in which there is a list of blocks
    with pytest.raises(TypeError, match=r"(?s)none of .* can be divided.*net: .*no layers.*layers: .*calls relu"):
        find_backbone(module, None)


def test_hooks_of_a_module_cut_as_a_whole_stay_its_own() -> None:
    """It is called in the step, so they run there, once; a Sequential inside keeps its hooks by staying a layer."""
    module = Whole()
    module.front.register_forward_hook(lambda *_: None)
    module.front[1].register_forward_hook(lambda *_: None)
    found: Backbone = find_backbone(module, "front")
    assert found.names == ("front.0", "front.1", "front.2")
