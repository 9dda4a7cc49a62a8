"""What each layer of a backbone costs, measured on a device (layer T).

    for each micro-batch size:  example ──► layer 0 ──► layer 1 ──► ...   each alone, on the output of the one before
                                            │ observe: output, activations kept     once
                                            │ time: forward, backward               warm-up, repeats, median
    times over sizes ──► AffineCost                              bytes at the largest size, per sample

Layers run in training or evaluation mode as they are, with gradients, and hooks of the user's run too. Nothing of them
changes: parameters are exchanged for aliases, or for copies if the device is another one, and buffers for copies
(`torch.func.functional_call`), so gradients and running statistics go there. Inputs are fresh clones each time, so a
layer may change them in place.

*Activations*: a tensor is charged to the first layer that keeps it. What a layer keeps of its own input when the layer
before it keeps that anyway is not counted twice, so the sum over layers is what one stage holds. A stage that begins in
between holds its input in addition: `LayerCost.output_bytes` of the layer before.

Layers of equal structure and input are timed once. The approach is ours; torch's profilers see operators, not layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.memory import (
    Kept,
    OptimizerSpec,
    copied_to,
    state_bytes,
    tensor_bytes,
    trained_bytes,
)
from lightning_hetero.pipeline.runtime.step.random_streams import nothing_drawn
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import LayerCost, ModelCost

Call = Callable[[nn.Module, Any], Any]
Times = tuple[float, float]  # forward, backward [s]

_OWN = frozenset(vars(nn.Module()))  # what every module has; all else are the layer's settings


def _call(layer: nn.Module, value: Any) -> Any:
    return layer(value)


@dataclass(frozen=True, slots=True)
class Example:
    """What a backbone is called with for one number of samples.

    Attributes:
        value: what the first layer is handed: a nest of tensors; ``requires_grad`` as in training.
        call: how a layer is called: ``call(layer, value)`` returns what the next one is handed.
    """

    value: Any
    call: Call = _call


def profile_on_device(
    layers: Sequence[nn.Module],
    examples: Mapping[int, Example],
    *,
    names: Sequence[str],
    before: LayerCost,
    head: LayerCost,
    optimizer: OptimizerSpec = None,
    repeats: int = 5,
    warm_ups: int = 2,
    timer: Timer | None = None,
) -> ModelCost:
    """Measures the layers where the examples are: times, activations, bytes.

    Layers that are elsewhere go there one at a time, in copies, so that of a model larger than the device no more than
    one layer has to fit. Run it inside ``torch.autocast`` if training does. Times are this device's: it is the one of
    speed 1.

    Args:
        layers: the backbone in order; each is called with what the one before returned.
        examples: by the number of samples, of two or more.
        names: of the layers, as in the model.
        before: cost of the training step up to the backbone.
        head: cost behind the backbone.
        optimizer: for its state's size, see `optimizer_bytes`.
        repeats: measurements per layer and size, whose median counts.
        warm_ups: runs before them that do not count.
        timer: stamps on the layers' device; injectable for tests.

    Raises:
        ValueError: an optimizer of unknown state.
        torch.OutOfMemoryError: a layer does not fit with the largest micro-batch.
        RuntimeError: a layer fails; the message names it.
    """
    device = tensors_of(examples[max(examples)].value)[0].device
    clock = timer or Timer(device)
    known: dict[tuple[str, int], Times] = {}

    def timed(trial: LayerTrial, samples: int) -> Times:
        kind = _kind_of(trial), samples
        if kind not in known:
            known[kind] = trial.time(clock, repeats, warm_ups)
        return known[kind]

    measured = layer_costs(layers, examples, timed, names=names, device=device)
    costs = [
        replace(cost, param_bytes=trained_bytes(layer), state_bytes=state_bytes(layer, optimizer))
        for layer, cost in zip(layers, measured, strict=True)
    ]
    return ModelCost(layers=tuple(costs), before=before, head=head)


def layer_costs(
    layers: Sequence[nn.Module],
    examples: Mapping[int, Example],
    times: Callable[[LayerTrial, int], Times],
    *,
    names: Sequence[str],
    device: torch.device,
) -> list[LayerCost]:
    """Takes examples through the layers; returns their costs without parameters and state, which need no measuring.

    Args:
        layers, examples, names: see `profile_on_device`.
        times: returns what a layer takes for so many samples.
        device: where layers run. ``meta``: nothing is computed.
    """
    with nothing_drawn(device), torch.inference_mode(False), torch.enable_grad():
        by_size = [_walk(layers, examples[n], n, times, names, device) for n in sorted(examples)]
        rows = zip(*by_size, strict=True)
        return [_cost(name, seen) for name, seen in zip(names, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class _Measured:
    """One layer at one size."""

    samples: int
    times: Times
    kept_bytes: int
    output_bytes: int


def _walk(
    layers: Sequence[nn.Module],
    example: Example,
    samples: int,
    times: Callable[[LayerTrial, int], Times],
    names: Sequence[str],
    device: torch.device,
) -> Iterator[_Measured]:
    """Yields the layers' measurements with one number of samples."""
    value = tree_map(lambda v: _own_copy(v, device) if isinstance(v, Tensor) else v, example.value)
    held: list[Tensor] = []  # those of the value's tensors which layers before keep
    for name, layer in zip(names, layers, strict=True):
        with _named(name, samples):
            trial = LayerTrial(layer, value, example.call, device)
            seen = trial.observe(held)
            measured = _Measured(samples, times(trial, samples), seen.kept_bytes, seen.output_bytes)
            del trial  # and its copy of the layer, before there is another one's
        yield measured
        value, held = seen.value, seen.held


def _own_copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _cost(name: str, seen: Sequence[_Measured]) -> LayerCost:
    sizes = [s.samples for s in seen]
    forward, backward = (fit_affine(sizes, [s.times[i] for s in seen]) for i in (0, 1))
    last = seen[-1]
    return LayerCost(
        name=name,
        forward=forward,
        backward=backward,
        activation_bytes=last.kept_bytes / last.samples,
        output_bytes=last.output_bytes / last.samples,
    )


@contextmanager
def _named(name: str, samples: int) -> Iterator[None]:
    """Says which layer failed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"layer {name!r} does not fit with {samples} samples: profile smaller micro-batches ({error})"
        raise torch.OutOfMemoryError(message) from error
    except Exception as error:
        raise RuntimeError(f"layer {name!r} fails with {samples} samples: {error}") from error


def _kind_of(trial: LayerTrial) -> str:
    """Returns text that is equal for layers that do the same work on inputs of the same shapes, in this process.

    Types, settings, shapes and dtypes count, values of parameters do not; an object is only equal to itself.
    """
    lines: list[Any] = [[_shape(leaf) for leaf in tree_leaves(trial.value)]]
    for name, module in trial.layer.named_modules(remove_duplicate=False):
        settings = {key: value for key, value in vars(module).items() if key not in _OWN}
        hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
        lines.append([name, str(type(module)), module.training, hooks, settings])
    tied: dict[int, str] = {}  # one bears the name of the first
    tensors = (trial.layer.named_parameters, trial.layer.named_buffers)
    for name, tensor in (pair for named in tensors for pair in named(remove_duplicate=False)):
        lines.append([name, tied.setdefault(id(tensor), name), _shape(tensor)])
    return json.dumps(lines, default=_shape, skipkeys=True)


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, nn.Module):
        return "module"  # listed by itself, or no part of the layer
    if isinstance(leaf, Tensor):
        return [list(leaf.shape), str(leaf.dtype), leaf.requires_grad]
    return str(leaf) if isinstance(leaf, torch.dtype | torch.device) else f"{type(leaf)} {id(leaf)}"


# ---- one layer and one input -----------------------------------------------------------------------------------


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def detached(value: Any) -> Any:
    """Returns a nest with its tensors off their graph; ``requires_grad`` as it was."""
    return tree_map(lambda v: v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v, value)


@dataclass(frozen=True, slots=True)
class Observed:
    """What one forward pass showed.

    Attributes:
        value: the output, detached.
        held: those of its tensors which this layer, or one before, keeps for the backward pass.
        kept_bytes: what this layer keeps and none before does.
        output_bytes: of all tensors of the output.
    """

    value: Any
    held: list[Tensor]
    kept_bytes: int
    output_bytes: int


class _Bench(nn.Module):
    """Runs a job with the layer's own tensors exchanged by `functional_call`, once for all of its calls."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, job: Callable[[], Any]) -> Any:
        return job()


class LayerTrial:
    """One layer and one input, run any number of times without a trace.

    Args:
        layer: not changed.
        value: its input; ``requires_grad`` of its tensors says where a gradient is wanted.
        call: how the layer is called.
        device: where it runs; parameters and buffers from elsewhere go there in copies. ``meta``: they are only
            described.
    """

    def __init__(self, layer: nn.Module, value: Any, call: Call, device: torch.device) -> None:
        self.layer, self.value, self._call = layer, value, call
        self._bench = _Bench(layer)
        named = {n: copied_to(p, device).requires_grad_(p.requires_grad) for n, p in self._bench.named_parameters()}
        for name, b in self._bench.named_buffers():
            named[name] = b.detach().clone() if b.device == device else copied_to(b, device)
        self._tensors = named
        self._gradients: list[Tensor | None] = []  # of the outputs; None where there is none

    def observe(self, held: Sequence[Tensor]) -> Observed:
        """Runs forward once; comes before the other methods.

        Args:
            held: tensors of the input which layers before keep.
        """
        value = self.fresh_input()
        ids = {id(t) for t in held}
        known = [new for old, new in zip(tensors_of(self.value), tensors_of(value), strict=True) if id(old) in ids]
        kept = Kept(self._tensors.values())

        def job() -> Any:
            with kept:
                return self._call(self.layer, value)

        output = self.run(job)
        outputs = tensors_of(output)
        # Made before anything is timed, and dense: an expanded one would be slower or faster.
        self._gradients = [torch.ones_like(t) if t.requires_grad else None for t in outputs]
        new_bytes = kept.size_bytes(known)
        kept.add(known)
        handed_on = detached(output)
        still_held = [t for t in tensors_of(handed_on) if t in kept]
        return Observed(handed_on, still_held, new_bytes, tensor_bytes(outputs))

    def time(self, timer: Timer, repeats: int, warm_ups: int) -> Times:
        """Returns the medians of forward and backward [s].

        Gradients of parameters add up from run to run, as over the micro-batches of a step; nothing is waited for in
        between, so that on a GPU short operations are queued as they will be.
        """

        def once() -> tuple[Any, Any, Any]:
            start, output, middle = timer.mark(), self.forward(), timer.mark()
            return start, middle, timer.mark() if self.backward(output) else middle

        def job() -> list[tuple[Any, Any, Any]]:
            timer.warm_up(once)
            return [once() for _ in range(warm_ups + repeats)][warm_ups:]

        marks = self.run(job)
        forward = median(timer.seconds(start, middle) for start, middle, _ in marks)
        return forward, median(timer.seconds(middle, end) for _, middle, end in marks)

    def run(self, job: Callable[[], Any]) -> Any:
        """Runs a job that may call `forward` and `backward`."""
        return functional_call(self._bench, self._tensors, (job,))

    def forward(self) -> Any:
        """Returns the layer's output."""
        return self._call(self.layer, self.fresh_input())

    def backward(self, output: Any) -> bool:
        """Lets gradients go back from an output; returns whether there are any."""
        pairs = [(t, g) for t, g in zip(tensors_of(output), self._gradients, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return bool(pairs)

    def fresh_input(self) -> Any:
        """Returns a copy of the input, not of leaves: a leaf must not be changed in place."""
        return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, detached(self.value))
