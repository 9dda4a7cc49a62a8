"""The layers of a backbone as a step calls them one after another, before any of them is computed (layer T).

In a step that runs in a pipeline a layer returns a `LayerOutput`: a stand-in for what it would return, which the step
may take apart (``out[0]``, ``x, weights = out``) and pass to the next layer, and nothing else. A `Route` is made of the
calls, and the tensors among their arguments are the backbone's inputs. Tensors made by anything but the layers can be
passed to any of them, at any time: the step can compute nothing from a stand-in, so they do not depend on a layer.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree  # private by name, but where torch registers its own classes

from lightning_hetero.pipeline.runtime.step.layer_calls.route import Input, OwnDevice, Path, Previous, Route
from lightning_hetero.pipeline.runtime.step.random_streams import nothing_drawn


class NotAChainError(RuntimeError):
    """The step does with the layers what a pipeline cannot do."""


class _NoAttributeError(NotAChainError, AttributeError):
    """The same, so that ``hasattr`` says no."""


@dataclass(frozen=True, slots=True)
class CalledLayer:
    """One call.

    Attributes:
        layer: its place among the modules that the step calls.
        args, kwargs: as passed, with stand-ins among them.
        grad_enabled: grad mode at the call.
        hooks: on saved tensors, in force at the call.
    """

    layer: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grad_enabled: bool
    hooks: Any


@dataclass(slots=True)
class LayerWalk:
    """The calls of one walk along the layers, as far as it has come.

    Attributes:
        modules: that the step calls, in order.
        original: computes one of them, by its place, as if there were no pipeline.
        structures: by place, what a module returns, with tensors on the meta device; filled where it is asked for,
            and kept from walk to walk.
        calls: so far.
    """

    modules: Sequence[nn.Module]
    original: Callable[..., Any]
    structures: dict[int, Any]
    calls: list[CalledLayer] = field(default_factory=list)

    def add(self, call: CalledLayer, given: Sequence[LayerOutput]) -> None:
        """Takes down the next call.

        Args:
            given: the stand-ins among its arguments.

        Raises:
            NotAChainError: it is not the call of the next layer with what the last one returned.
        """
        layer = call.layer
        fits = layer == len(self.calls) and all(out.chain is self and out.layer == layer - 1 for out in given)
        if layer and not (fits and given):
            raise NotAChainError(
                f"layer {layer} of the backbone was called with something else than the output of layer {layer - 1}: a"
                " pipeline computes the layers one after another, without what stands between them; move it into a"
                " layer"
            )
        self.calls.append(call)

    # ---- of all calls ----------------------------------------------------------------------------------------------

    def route(self, starts: Sequence[int]) -> tuple[Route, list[Tensor]]:
        """Returns how the layers were called, and the tensors that they were called with, each once.

        Args:
            starts: the index in the backbone of each module's first layer.

        Raises:
            NotAChainError: an argument that cannot travel between processes; names it.
        """
        inputs: list[Tensor] = []
        numbers: dict[int, int] = {}

        def number_of(tensor: Tensor) -> int:
            if id(tensor) not in numbers:
                numbers[id(tensor)] = len(inputs)
                inputs.append(tensor)
            return numbers[id(tensor)]

        grad_enabled, checkpointed = self.grad_enabled, self.hooked_one_by_one
        forms: list[tuple[int, Mapping[str, Any]]] = []
        for i, call in enumerate(self.calls):
            if i > 1 and _alike(self.calls[i - 1], call):
                form = forms[-1][1]
            else:
                form = self._form(call, number_of, grad_enabled=grad_enabled, checkpointed=checkpointed)
            forms.append((starts[call.layer], form))
        return Route.of(forms), inputs

    def _form(
        self, call: CalledLayer, number_of: Callable[[Tensor], int], *, grad_enabled: bool, checkpointed: bool
    ) -> Mapping[str, Any]:
        at = f"layer {call.layer} of the backbone is called with"
        found: dict[str, Any] = {
            "args": tuple([_form(value, number_of, f"{at} argument {i}") for i, value in enumerate(call.args)]),
            "kwargs": {name: _form(value, number_of, f"{at} {name}=") for name, value in call.kwargs.items()},
        }
        if call.hooks is not None and checkpointed:
            found["recompute"] = True
        if grad_enabled and not call.grad_enabled:
            found["no_grad"] = True
        return found

    @property
    def grad_enabled(self) -> bool:
        """Whether some layer was called with gradients."""
        return any(call.grad_enabled for call in self.calls)

    @property
    def hooked_one_by_one(self) -> bool:
        """Whether saved-tensor hooks were put on for each layer alone, as `torch.utils.checkpoint` around it does."""
        hooks = [call.hooks for call in self.calls if call.hooks is not None]
        return len(hooks) > 1 and all(one != other for one, other in pairwise(hooks))

    # ---- what a layer returns --------------------------------------------------------------------------------------

    def structure(self, layer: int) -> Any:
        """Returns what a module of the walk returns, with tensors on the meta device, which compute nothing.

        Raises:
            NotAChainError: it cannot be found out in this way.
        """
        for place in range(layer + 1):
            if place not in self.structures:
                self.structures[place] = self._on_meta(self.calls[place])
        return self.structures[layer]

    def _on_meta(self, call: CalledLayer) -> Any:
        module = self.modules[call.layer]
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        args, kwargs = pytree.tree_map(self._meta, (call.args, dict(call.kwargs)))
        try:
            with torch.no_grad(), nothing_drawn(torch.device("cpu")), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                bench = _Original(module, lambda *a, **k: self.original(call.layer, *a, **k))
                meta = {f"module.{name}": _meta(tensor) for name, tensor in tensors.items()}
                return functional_call(bench, meta, args, kwargs)
        except Exception as error:
            raise NotAChainError(
                f"what layer {call.layer} of the backbone returns cannot be found out without computing it ({error});"
                " take it apart by position, out = layer(...); x = out[0], or in the layer itself"
            ) from error

    def _meta(self, value: Any) -> Any:
        if type(value) is LayerOutput:
            found = self.structures[value.layer]
            for key in value.path:
                found = found[key]
            return found
        return _meta(value) if isinstance(value, Tensor) else without_cache(value)


class _Original(nn.Module):
    """Calls a function of a module, whose tensors `functional_call` may exchange meanwhile."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _form(value: Any, number_of: Callable[[Tensor], int], at: str) -> Any:
    """Returns what stands for an argument. (No closure that calls itself: it would keep the tensors for a while.)"""

    def leaf_of(leaf: Any) -> Any:
        if type(leaf) is LayerOutput:
            return Previous(leaf.path)
        if isinstance(leaf, Tensor):
            return Input(number_of(leaf))
        if isinstance(leaf, torch.device):
            return OwnDevice(leaf.type)
        if isinstance(leaf, dict):  # of a class of its own
            return _form(dict(leaf), number_of, at)
        if leaf is None or isinstance(leaf, bool | int | float | str | torch.dtype | torch.Size):
            return leaf
        raise NotAChainError(
            f"{at}, a {type(leaf).__name__}, which cannot travel to the process that computes it; tensors, numbers,"
            " strings, None, and tuples, lists and dicts of them can: make it part of the layers, or switch off what it"
            " is for"
        )

    return pytree.tree_map(leaf_of, without_cache(value), is_leaf=lambda v: type(v) not in (tuple, list, dict))


def _meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:  # another rank's, of which an operation would be an error
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _alike(one: CalledLayer, other: CalledLayer) -> bool:
    """Whether two calls in a row differ in the layer only, seen at a glance: else they are looked into."""
    if len(one.args) != len(other.args) or one.kwargs.keys() != other.kwargs.keys():
        return False
    if (one.grad_enabled, one.hooks is None) != (other.grad_enabled, other.hooks is None):
        return False
    pairs = [*zip(one.args, other.args, strict=True), *((v, other.kwargs[k]) for k, v in one.kwargs.items())]
    return all(a is b or (type(a) is type(b) is LayerOutput and a.path == b.path) for a, b in pairs)


def stand_ins(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[LayerOutput]:
    """Returns the stand-ins among the arguments of a call."""
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if type(leaf) is LayerOutput]


class LayerOutput:
    """What a layer returns in a step, instead of its output, which is computed elsewhere.

    Attributes:
        chain: the walk.
        layer: whose output it is: its place in the walk.
        path: of this part of the output; empty: all of it.
    """

    def __init__(self, chain: LayerWalk, layer: int, path: Path = ()) -> None:
        self.chain, self.layer, self.path = chain, layer, path

    def __getitem__(self, key: Any) -> LayerOutput:
        if isinstance(key, int | str) and not isinstance(key, bool):
            if self._is(tuple, list, Tensor) and isinstance(key, int) and key < 0:
                key += len(self._structure())
            if not self._is(Tensor):  # of a tensor it would be a computation
                return LayerOutput(self.chain, self.layer, (*self.path, key))
        if isinstance(key, slice) and self._is(tuple):
            return tuple(self)[key]  # type: ignore[return-value]
        raise NotAChainError(self._unknown())

    def __iter__(self) -> Iterator[LayerOutput]:
        structure = self._structure()
        if isinstance(structure, Tensor):
            raise NotAChainError(self._unknown())
        keys = structure if isinstance(structure, dict) else range(len(structure))
        return iter([LayerOutput(self.chain, self.layer, (*self.path, key)) for key in keys])

    def __len__(self) -> int:
        return len(self._structure())

    def __add__(self, other: Any) -> Any:
        if isinstance(other, tuple) and self._is(tuple):
            return tuple(self) + other
        raise NotAChainError(self._unknown())

    def __bool__(self) -> bool:
        raise NotAChainError(self._unknown())

    @property
    def __class__(self) -> type:  # type: ignore[override]
        # Models ask isinstance(out, tuple) to see whether to take the first.
        return tuple if self._is(tuple) else LayerOutput

    def _structure(self) -> Any:
        found = self.chain.structure(self.layer)
        for key in self.path:
            found = found[key]
        return found

    def _is(self, *kinds: type) -> bool:
        try:
            return isinstance(self._structure(), kinds)
        except (RuntimeError, LookupError, TypeError):  # not known: as one takes it to be
            return False

    def _unknown(self) -> str:
        return (
            f"the output of layer {self.__dict__.get('layer')} of the backbone is only known to the stage of a"
            " pipeline that computes it: pass it to the next layer and to nothing else, or move what uses it there"
        )

    def __getattr__(self, name: str) -> Any:
        text = f"no {name!r}: {self._unknown()}"
        raise _NoAttributeError(text)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        between = next(value for value in pytree.tree_leaves((args, kwargs)) if type(value) is cls)
        raise NotAChainError(between._unknown())  # not TypeError: operators would take it for NotImplemented


# ---- caches of keys and values ---------------------------------------------------------------------------------
# Models of `transformers` hand one to each of their layers, for generating text token by token. In a training step, or
# a validation step that calls the model once, each layer writes to its own part, which is never read: an empty cache
# and none compute the same. So in a pipeline a layer gets none. A cache that comes a second time was meant to be read,
# and the result would be wrong: refused.


def without_cache(value: Any) -> Any:
    """Returns None in place of a cache, and everything else unchanged."""
    return None if _is_cache(value) else value


class SeenCaches:
    """The caches that the calls of one backbone have come with, while they exist."""

    def __init__(self) -> None:
        self._seen: WeakSet[Any] = WeakSet()

    def add(self, values: Iterable[Any]) -> None:
        """Takes down the caches among the arguments of a call.

        Raises:
            RuntimeError: one is not empty, or has come before.
        """
        for cache in filter(_is_cache, values):
            if cache in self._seen or cache.get_seq_length() > 0:
                raise RuntimeError(
                    f"the backbone is called with a {type(cache).__name__} that an earlier call has filled: the layers"
                    " of a pipeline keep no keys and values from call to call; pass use_cache=False (to generate():"
                    " slower, the same text), or generate on one device"
                )
            self._seen.add(cache)


def _is_cache(value: Any) -> bool:
    transformers = sys.modules.get("transformers")  # a cache is only there where it is imported
    return transformers is not None and isinstance(value, transformers.Cache)
