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

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

_KEPT = 256  # routes remembered by their text

_PREVIOUS: dict[str, Any] = {"previous": []}
_PLAIN_CALL: dict[str, Any] = {"args": [_PREVIOUS], "kwargs": {}}

Path = tuple[int | str, ...]
"""Where in a layer's output something is: positions and keys, from the outside in."""


def encode(value: Any, number_of: Callable[[Tensor], int], path_of: Callable[[Any], Path | None]) -> Any:
    """Returns an argument as JSON, with references in place of tensors and of what the layer before returned.

    Args:
        value: an argument.
        number_of: numbers the inputs.
        path_of: of a part of the previous layer's output; None for all else.

    Raises:
        TypeError: something in it cannot travel between processes; the message is about its type only.
    """
    if (path := path_of(value)) is not None:
        return {"previous": list(path)}
    if isinstance(value, Tensor):
        return {"input": number_of(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    if kind is tuple or kind is torch.Size:
        return {"tuple" if kind is tuple else "size": [encode(item, number_of, path_of) for item in value]}
    if kind is list:
        return [encode(item, number_of, path_of) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, number_of, path_of) for key, item in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}  # a stage's own device of the kind
    what = f"a {kind.__name__}"
    raise TypeError(what)


class LayerCall:
    """How one layer is called, ready to be filled in.

    Args:
        form: as `encode` makes it: ``args``, ``kwargs``, and optionally ``recompute`` and ``no_grad``.

    Attributes:
        previous: the parts of the previous layer's output that it takes, each once.
        inputs: the numbers of the inputs that it takes.
        recompute: the step checkpoints it: what it computes is computed again in backward.
        no_grad: the step calls it without gradients, others with.
    """

    def __init__(self, form: Mapping[str, Any]) -> None:
        self._args, self._kwargs = form["args"], form["kwargs"]
        self.recompute: bool = form.get("recompute", False)
        self.no_grad: bool = form.get("no_grad", False)
        paths: dict[Path, None] = {}
        inputs: set[int] = set()
        for kind, leaf in _references([self._args, *self._kwargs.values()]):
            if kind == "previous":
                paths[tuple(leaf)] = None
            else:
                inputs.add(leaf)
        self.previous: tuple[Path, ...] = tuple(paths)
        self.inputs = frozenset(inputs)
        self._plain = self._args == [_PREVIOUS] and not self._kwargs

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
        parts = dict(zip(self.previous, previous, strict=True))
        args = [_filled(form, parts, inputs, device) for form in self._args]
        return tuple(args), {k: _filled(form, parts, inputs, device) for k, form in self._kwargs.items()}


def _filled(form: Any, parts: Mapping[Path, Any], inputs: Mapping[int, Tensor], device: torch.device) -> Any:
    """Returns what a form stands for. (No closure that calls itself: it would keep the tensors for a while.)"""
    if isinstance(form, list):
        return [_filled(item, parts, inputs, device) for item in form]
    if not isinstance(form, dict):
        return form
    ((kind, of),) = form.items()
    match kind:
        case "previous":
            return parts[tuple(of)]
        case "input":
            return inputs[of]
        case "tuple":
            return tuple([_filled(item, parts, inputs, device) for item in of])
        case "size":
            return torch.Size(of)
        case "dict":
            return {key: _filled(item, parts, inputs, device) for key, item in of.items()}
        case "dtype":
            return getattr(torch, of)
        case _:
            return device if device.type == of else torch.device(of)


class Route:
    """How all layers of a backbone are called.

    Args:
        text: as `Route.of` writes it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        form = json.loads(text)
        calls = [LayerCall(call) for call in form["calls"]]
        self._runs = [(first, calls[number]) for first, number in form["runs"]]
        # From the last run back: the inputs that its layers, or later ones, take.
        later: frozenset[int] = frozenset()
        self._needed: list[list[int]] = []
        for _, call in reversed(self._runs):
            later = later | call.inputs
            self._needed.insert(0, sorted(later))

    @staticmethod
    def of(calls: Sequence[tuple[int, Mapping[str, Any]]]) -> Route:
        """Returns the route of layers that are called in this way.

        Args:
            calls: index of the layer and form of its call, in order, the first layer's first. A layer in between that
                is not named gets what the one before returned, as those behind the last one named do if it is plain.
        """
        texts: dict[str, int] = {}
        runs: list[list[int]] = []
        behind = 0

        def add(first: int, form: Mapping[str, Any]) -> None:
            number = texts.setdefault(json.dumps(form, separators=(",", ":")), len(texts))
            if not runs or runs[-1][1] != number:
                runs.append([first, number])

        for index, form in calls:
            if index > behind:
                add(behind, _PLAIN_CALL)
            add(index, form)
            behind = index + 1
        add(behind, _PLAIN_CALL)
        return route_of(f'{{"calls":[{",".join(texts)}],"runs":{json.dumps(runs, separators=(",", ":"))}}}')

    def call(self, layer: int) -> LayerCall:
        """Returns how a layer is called."""
        return self._runs[self._run(layer)][1]

    def _run(self, layer: int) -> int:
        number = len(self._runs) - 1
        while self._runs[number][0] > layer:
            number -= 1
        return number

    # ---- between two layers ----------------------------------------------------------------------------------------

    def inputs_from(self, layer: int) -> list[int]:
        """Returns the numbers of the inputs that a layer, or one behind it, takes."""
        return self._needed[self._run(layer)]

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


def _references(form: Any) -> Iterator[tuple[str, Any]]:
    """Yields the references to outputs and inputs in a form."""
    if isinstance(form, list):
        for item in form:
            yield from _references(item)
    elif isinstance(form, dict):
        ((kind, of),) = form.items()
        if kind in ("previous", "input"):
            yield kind, of
        elif kind == "tuple":
            yield from _references(of)
        elif kind == "dict":
            yield from _references(list(of.values()))


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
def route_of(text: str) -> Route:
    """Returns the route that was written as this text; an empty text: the plain one, with one input."""
    return Route(text) if text else PLAIN


PLAIN = Route.of([(0, {"args": [{"input": 0}], "kwargs": {}})])
"""The first layer is called with one tensor, each other with what the one before returned."""
PLAIN.text = ""  # the shortest there is: it travels with every message
