"""How a step calls the layers of its backbone: what each gets besides what the one before returned (layer T).

    hidden = block(hidden, mask, position_embeddings=(cos, sin), use_cache=False)      in a loop over the blocks

    inputs   0: hidden before the first block, 1: mask, 2: cos, 3: sin         each tensor once
    layer 0  (input 0, input 1), position_embeddings=(input 2, input 3), use_cache=False
    layer 1  (previous, input 1), position_embeddings=(input 2, input 3), use_cache=False
    ...

A stage is handed what its first layer takes of the output before it, and those inputs that it or a later stage needs:
they travel along the pipeline once per stage, and their gradients come back the same way. Everything else that a layer
is called with (numbers, strings, None, nests of those) is part of the route itself. Most backbones have the plain
route: each layer is called with what the one before returned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private by name, but where torch registers its own classes

from lightning_hetero.transport.objects import from_bytes, to_bytes

_KEPT = 256  # routes remembered by their text

Path = tuple[int | str, ...]
"""Where in a layer's output something is: positions and keys, from the outside in."""


@dataclass(frozen=True, slots=True)
class Previous:
    """Stands for a part of what the layer before returned."""

    path: Path


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for a tensor that the step calls layers with."""

    number: int


@dataclass(frozen=True, slots=True)
class OwnDevice:
    """Stands for a stage's own device of a kind."""

    kind: str


_PLAIN_CALL: dict[str, Any] = {"args": (Previous(()),), "kwargs": {}}


class LayerCall:
    """How one layer is called, ready to be filled in.

    Args:
        form: ``args`` and ``kwargs``, with `Previous`, `Input` and `OwnDevice` for what they stand for, and optionally
            ``recompute`` and ``no_grad``.

    Attributes:
        previous: the parts of the previous layer's output that it takes, each once.
        inputs: the numbers of the inputs that it takes.
        recompute: the step checkpoints it: what it computes is computed again in backward.
        no_grad: the step calls it without gradients, others with.
    """

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._leaves, self._spec = pytree.tree_flatten((form["args"], form["kwargs"]))
        self.recompute: bool = form.get("recompute", False)
        self.no_grad: bool = form.get("no_grad", False)
        self.previous = tuple(dict.fromkeys(leaf.path for leaf in self._leaves if isinstance(leaf, Previous)))
        self.inputs = frozenset(leaf.number for leaf in self._leaves if isinstance(leaf, Input))
        self._plain = form == _PLAIN_CALL

    def arguments(
        self, previous: Sequence[Any], inputs: Mapping[int, Tensor], device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what to call the layer with.

        Args:
            previous: the values of `previous`, in order.
            inputs: by number.
            device: of the stage, instead of one that the step passes.
        """
        if self._plain:
            return (previous[0],), {}
        parts, leaves = dict(zip(self.previous, previous, strict=True)), list[Any]()
        for leaf in self._leaves:
            match leaf:
                case Previous():
                    leaf = parts[leaf.path]
                case Input():
                    leaf = inputs[leaf.number]
                case OwnDevice():
                    leaf = device if device.type == leaf.kind else torch.device(leaf.kind)
            leaves.append(leaf)
        return pytree.tree_unflatten(leaves, self._spec)


class Route:
    """How all layers of a backbone are called.

    Args:
        text: as `Route.of` writes it.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        forms = from_bytes(text)
        made = {id(form): LayerCall(form) for form in forms}  # forms that are one object are pickled as one
        self._calls = [made[id(form)] for form in forms]
        later = accumulate((call.inputs for call in reversed(self._calls)), operator.or_)
        self._needed = [sorted(inputs) for inputs in later][::-1]  # by each layer, or later ones

    @staticmethod
    def of(calls: Sequence[tuple[int, Mapping[str, Any]]]) -> Route:
        """Returns the route of layers that are called in this way.

        Args:
            calls: index of the layer and form of its call, in order, the first layer's first. A layer that is not named
                gets what the one before returned.
        """
        forms: list[Mapping[str, Any]] = []
        for index, form in calls:
            forms += [_PLAIN_CALL] * (index - len(forms))
            forms.append(_PLAIN_CALL if form == _PLAIN_CALL else form)
        while forms[-1] is _PLAIN_CALL:
            forms.pop()
        return route_of(to_bytes([*forms, _PLAIN_CALL]))

    def call(self, layer: int) -> LayerCall:
        """Returns how a layer is called."""
        return self._calls[min(layer, len(self._calls) - 1)]

    # ---- between two layers ----------------------------------------------------------------------------------------

    def inputs_from(self, layer: int) -> list[int]:
        """Returns the numbers of the inputs that a layer, or one behind it, takes."""
        return self._needed[min(layer, len(self._needed) - 1)]

    def pack(self, layer: int, previous: Sequence[Any], inputs: Mapping[int, Tensor]) -> Any:
        """Returns what is handed on to ``layer``: one value, or a tuple of two tuples, of outputs and of inputs."""
        numbers = self.inputs_from(layer)
        if len(previous) + len(numbers) == 1:
            return previous[0] if previous else inputs[numbers[0]]
        return tuple(previous), tuple([inputs[number] for number in numbers])

    def unpack(self, layer: int, value: Any) -> tuple[Sequence[Any], dict[int, Tensor]]:
        """Returns what `pack` has put together."""
        numbers, paths = self.inputs_from(layer), self.call(layer).previous
        if len(paths) + len(numbers) == 1:
            return ([value], {}) if paths else ([], {numbers[0]: value})
        previous, inputs = value
        return previous, dict(zip(numbers, inputs, strict=True))

    def taken(self, layer: int, output: Any) -> list[Any]:
        """Returns what ``layer`` takes of the output of the layer before it.

        Raises:
            RuntimeError: the output is not what the step took it for.
        """
        return [_part(output, path, layer - 1) for path in self.call(layer).previous]


class RoutedCall:
    """Calls layers one by one on what `Route.pack` hands from one to the next, e.g. to measure each alone.

    Args:
        route: of the layers.
        layers: all of them, in order.
        call: how a layer is called: ``call(layer, *args, **kwargs)``; None: directly.
    """

    def __init__(self, route: Route, layers: Sequence[nn.Module], call: Callable[..., Any] | None = None) -> None:
        self._route, self._called = route, call
        self._index = {id(layer): i for i, layer in enumerate(layers)}

    def __call__(self, layer: nn.Module, value: Any) -> Any:
        index = self._index[id(layer)]
        previous, inputs = self._route.unpack(index, value)
        device = next((t.device for t in [*previous, *inputs.values()] if isinstance(t, Tensor)), torch.device("cpu"))
        args, kwargs = self._route.call(index).arguments(previous, inputs, device)
        output = layer(*args, **kwargs) if self._called is None else self._called(layer, *args, **kwargs)
        if index + 1 == len(self._index):
            return output
        return self._route.pack(index + 1, self._route.taken(index + 1, output), inputs)


def _part(output: Any, path: Path, layer: int) -> Any:
    value = output
    for key in path:
        try:
            value = value[key]
        except (TypeError, KeyError, IndexError) as error:
            raise RuntimeError(
                f"the step takes item {key!r} of what layer {layer} of the backbone returns, a"
                f" {type(value).__name__}, which has no such item ({error})"
            ) from error
    return value


@lru_cache(maxsize=_KEPT)
def route_of(text: bytes) -> Route:
    """Returns the route that was written as this text; an empty text: the plain one, with one input."""
    return Route(text) if text else PLAIN


PLAIN = Route.of([(0, {"args": (Input(0),), "kwargs": {}})])
"""The first layer is called with one tensor, each other with what the one before returned."""
PLAIN.text = b""  # the shortest there is: it travels with every message
