"""What each layer of a backbone costs, measured on a device (layer T).

    for each micro-batch size:  example ──► layer 0 ──► layer 1 ──► ...   each alone, on the output of the one before
                                            │ observe: output, activations kept     once
                                            │ time: forward, backward               warm-up, repeats, median
    times over sizes ──► AffineCost                              bytes at the largest size, per sample

Layers run in the present mode, training or evaluation, with gradients and all hooks; their gradients are None
afterwards, and what else that changes is put back by a `Snapshot`. Inputs are fresh clones each time, so a layer may
change them in place.

*Activations*: a tensor is charged to the first layer that keeps it. What a layer keeps of its own input when the layer
before it keeps that anyway is not counted twice, so the sum over layers is what one stage holds. A stage that begins in
between holds its input in addition: `LayerCost.output_bytes` of the layer before.

Layers of equal structure and input are timed once. The approach is ours; torch's profilers see operators, not layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.memory import Kept, resident, state_bytes, tensor_bytes, trained_bytes
from lightning_hetero.pipeline.runtime.step.layer_calls.route import Route, RoutedCall
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import LayerCost, ModelCost

Call = Callable[[nn.Module, Any], Any]
Times = tuple[float, float]  # forward, backward [s]

_REPEATS, _WARM_UPS = 5, 2  # measurements per layer and size, whose median counts, and runs before that do not
_OWN = frozenset(vars(nn.Module()))  # what every module has; all else are the layer's settings


def profile_on_device(
    layers: Sequence[nn.Module], examples: Mapping[int, tuple[Route, Any]], *, names: Sequence[str],
    before: LayerCost, head: LayerCost, device: torch.device, copies: Mapping[int, int],
    call: Callable[..., Any] | None = None,
) -> ModelCost:  # fmt: skip
    """Measures the layers: times, activations, bytes.

    Layers that are elsewhere go there one at a time, in copies, so that of a model larger than the device no more than
    one layer has to fit. Run it inside ``torch.autocast`` if training does. Times are this device's: it is the one of
    speed 1.

    Args:
        layers: the backbone in order.
        examples: by the number of samples, of two or more: how the layers are called, and what the first is handed,
            see `Route.pack`; ``requires_grad`` of its tensors as in training.
        names: of the layers, as in the model.
        before: cost of the training step up to the backbone.
        head: cost behind the backbone.
        device: where the examples are.
        copies: of parameters that the optimizer keeps, see `state_copies`.
        call: how a layer is called, see `RoutedCall`.

    Raises:
        torch.OutOfMemoryError: a layer does not fit with the largest micro-batch.
        RuntimeError: a layer fails; the message names it.
    """
    timer, known, sizes = Timer(device), dict[tuple[str, int], Times](), sorted(examples)
    walks = [_Walk(n, value, RoutedCall(route, layers, call)) for n, (route, value) in sorted(examples.items())]
    with torch.inference_mode(False), torch.enable_grad():
        costs = [
            _cost(name, layer, sizes, [walk.through(name, layer, timer, known) for walk in walks], copies)
            for name, layer in zip(names, layers, strict=True)
        ]
    return ModelCost(layers=tuple(costs), before=before, head=head)


class Observed(NamedTuple):
    """What one forward pass showed.

    Attributes:
        value: the output, detached.
        held: those of its tensors which this layer, or one before, keeps for the backward pass.
        kept_bytes: what this layer keeps and none before does.
        output_bytes: of all tensors of the output.
        gradients: for each tensor of the output that wants one, of ones; else None.
    """

    value: Any
    held: list[Tensor]
    kept_bytes: int
    output_bytes: int
    gradients: list[Tensor | None]


@dataclass(slots=True)
class _Walk:
    """An example of one size on its way through the layers.

    Attributes:
        samples: the size.
        value: what the next layer is handed.
        call: how it is called.
        held: those of the value's tensors which layers before keep.
    """

    samples: int
    value: Any
    call: Call
    held: list[Tensor] = field(default_factory=list)

    def through(
        self, name: str, layer: nn.Module, timer: Timer, known: dict[tuple[str, int], Times]
    ) -> tuple[Times, Observed]:
        """Measures the next layer, and takes the example through it.

        Args:
            name: of the layer, for errors.
            layer: runs on the timer's device.
            timer: of the device.
            known: times of layers by their kind and the number of samples, to which this one's are added.
        """
        try:
            with resident(layer, timer.device):
                seen = observe(layer, self.value, self.call, self.held)
                kind = _kind_of(layer, self.value), self.samples
                if kind not in known:
                    known[kind] = self._time(layer, seen.gradients, timer)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"layer {name!r} does not fit with {self.samples} samples: profile smaller micro-batches ({error})"
            ) from error
        except Exception as error:
            raise RuntimeError(f"layer {name!r} fails with {self.samples} samples: {error}") from error
        self.value, self.held = seen.value, seen.held
        return known[kind], seen

    def _time(self, layer: nn.Module, gradients: Sequence[Tensor | None], timer: Timer) -> Times:
        """Returns the medians of forward and backward [s].

        Gradients of parameters add up from run to run, as over the micro-batches of a step; nothing is waited for in
        between, so that on a GPU short operations are queued as they will be.
        """

        def once() -> tuple[Any, Any, Any]:
            start, output, middle = timer.mark(), self.call(layer, _clones(self.value)), timer.mark()
            pairs = [(t, g) for t, g in zip(tensors_of(output), gradients, strict=True) if g is not None]
            if not pairs:
                return start, middle, middle
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
            return start, middle, timer.mark()

        try:
            timer.warm_up(once)
            marks = [once() for _ in range(_WARM_UPS + _REPEATS)][_WARM_UPS:]
        finally:
            layer.zero_grad(set_to_none=True)
        forward = median(timer.seconds(start, middle) for start, middle, _ in marks)
        return forward, median(timer.seconds(middle, end) for _, middle, end in marks)


def observe(layer: nn.Module, value: Any, call: Call, held: Sequence[Tensor]) -> Observed:
    """Runs a layer forward once.

    Args:
        layer: on the device of its input.
        value: what it is handed.
        call: how it is called: ``call(layer, value)``.
        held: tensors of the value which layers before keep.
    """
    given, ids = _clones(value), {id(tensor) for tensor in held}
    known = [new for old, new in zip(tensors_of(value), tensors_of(given), strict=True) if id(old) in ids]
    kept = Kept([*layer.parameters(), *layer.buffers()])
    with kept:
        output = call(layer, given)
    outputs = tensors_of(output)
    # Made before anything is timed, and dense: an expanded one would be slower or faster.
    gradients = [torch.ones_like(t) if t.requires_grad else None for t in outputs]
    new_bytes = kept.size_bytes(known)
    kept.add(known)
    handed_on = detached(output)
    still_held = [t for t in tensors_of(handed_on) if t in kept]
    return Observed(handed_on, still_held, new_bytes, tensor_bytes(outputs), gradients)


def _cost(
    name: str, layer: nn.Module, sizes: Sequence[int], measured: Sequence[tuple[Times, Observed]],
    copies: Mapping[int, int],
) -> LayerCost:  # fmt: skip
    forward, backward = (fit_affine(sizes, [times[i] for times, _ in measured]) for i in (0, 1))
    largest, (_, seen) = sizes[-1], measured[-1]
    return LayerCost(
        name=name, forward=forward, backward=backward, param_bytes=trained_bytes(layer),
        state_bytes=state_bytes(layer, copies), activation_bytes=seen.kept_bytes / largest,
        output_bytes=seen.output_bytes / largest,
    )  # fmt: skip


def _kind_of(layer: nn.Module, value: Any) -> str:
    """Returns text that is equal for layers that do the same work on inputs of the same shapes, in this process.

    Types, settings, shapes and dtypes count, values of parameters do not; an object is only equal to itself.
    """
    lines: list[Any] = [[_shape(leaf) for leaf in tree_leaves(value)]]
    for name, module in layer.named_modules(remove_duplicate=False):
        settings = {key: value for key, value in vars(module).items() if key not in _OWN}
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        lines.append([name, str(type(module)), module.training, hooks, settings])
    tied: dict[int, str] = {}  # one bears the name of the first
    for named in (layer.named_parameters, layer.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            lines.append([name, tied.setdefault(id(tensor), name), _shape(tensor)])
    return json.dumps(lines, default=_shape, skipkeys=True)


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, nn.Module):
        return "module"  # listed by itself, or no part of the layer
    if isinstance(leaf, Tensor):
        return [list(leaf.shape), str(leaf.dtype), leaf.requires_grad]
    return str(leaf) if isinstance(leaf, torch.dtype | torch.device) else f"{type(leaf)} {id(leaf)}"


# ---- nests of tensors ------------------------------------------------------------------------------------------


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def detached(value: Any) -> Any:
    """Returns a nest with its tensors off their graph; ``requires_grad`` unchanged."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def _clones(value: Any) -> Any:
    """Returns a nest with copies of its tensors; no leaves, which could not be overwritten."""
    return tree_map_only(Tensor, torch.clone, detached(value))
