"""What each layer of a backbone costs: measured on a device, or counted without one (layer T).

    for each micro-batch size:  example ──► layer 0 ──► layer 1 ──► ...   each alone, on the output of the one before
                                            │ observe: output, activations kept     once
                                            │ time: forward, backward               warm-up, repeats, median
    times over sizes ──► AffineCost                              bytes at the largest size, per sample

Layers run in training or evaluation mode as they are, with gradients, and hooks of the user's run too. Parameters'
``.grad``, BatchNorm's statistics and the generators of random numbers are afterwards as they were, see `Trial`.

*Activations*: a tensor is charged to the first layer that keeps it. What a layer keeps of its own input when the layer
before it keeps that anyway is not counted twice, so the sum over layers is what one stage holds. A stage that begins in
between holds its input in addition: `LayerCost.output_bytes` of the layer before.

Layers of equal structure and input are timed once. The approach is ours; torch's profilers see operators, not layers.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hetero.measure import cache
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.decide.costs import layer_from_plain, layer_to_plain
from lightning_hetero.pipeline.runtime.measure.layer_identity import structure_of
from lightning_hetero.pipeline.runtime.measure.memory import (
    OptimizerSpec,
    state_bytes,
    tensor_bytes,
    trained_bytes,
)
from lightning_hetero.pipeline.runtime.measure.one_layer import Call, Times, Trial, shape_of, tensors_of
from lightning_hetero.pipeline.runtime.step.random_streams import nothing_drawn
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

__all__ = ["Example", "estimate_on_meta", "profile_key", "profile_on_device"]

VERSION = 2  # of the procedure; part of the cache's key
CACHE_KIND = "profile"

_ZERO = AffineCost(fixed_s=0.0, per_sample_s=0.0)


def _call(layer: nn.Module, value: Any) -> Any:
    return layer(value)


@dataclass(frozen=True, slots=True)
class Example:
    """What a backbone is called with for one number of samples.

    Attributes:
        value: what the first layer is handed; ``requires_grad`` as in training.
        call: how a layer is called: ``call(layer, value)`` returns what the next one is handed.
        key: what tells this call from others in a cache.
    """

    value: Any
    call: Call = _call
    key: str = ""


def profile_on_device(
    layers: Sequence[nn.Module],
    example: Any,
    *,
    names: Sequence[str] | None = None,
    micro_samples: Sequence[int] | None = None,
    optimizer: OptimizerSpec = None,
    before: LayerCost | None = None,
    head: LayerCost | None = None,
    repeats: int = 5,
    warm_ups: int = 2,
    call: Call = _call,
    cache_folder: str | Path | None = None,
    timer: Timer | None = None,
) -> ModelCost:
    """Measures the layers where the example is: times, activations, bytes.

    Layers that are elsewhere go there one at a time, in copies, so that of a model larger than the device no more than
    one layer has to fit. Run it inside ``torch.autocast`` if training does. Times are this device's: it is the one of
    speed 1.

    Args:
        layers: the backbone in order; each is called with what the one before returned.
        example: the backbone's input: a tensor, or nested tuples of tensors. Tensors whose first dimension equals the
            first tensor's are batched by it, and cut or repeated to each micro-batch size; others pass as they are.
            ``requires_grad`` as in training: set where trained code stands before the backbone. Or an `Example` for
            each size, two or more, by samples; then ``micro_samples`` and ``call`` are left out.
        names: of the layers, as in the model; left out: their positions.
        micro_samples: two or more sizes to measure [samples]; left out: the example's and a quarter of it, at least 8
            and 2.
        optimizer: for its state's size, see `lightning_hetero.pipeline.runtime.measure.memory.optimizer_bytes`.
        before: cost of the training step up to the backbone; left out: nothing but the backbone's input.
        head: cost behind the backbone; left out: nothing.
        repeats: measurements per layer and size, whose median counts.
        warm_ups: runs before them that do not count.
        call: how a layer is called: ``call(layer, value)``.
        cache_folder: where times and activations are kept between runs, by `profile_key`; ``None``: nowhere.
        timer: stamps on the layers' device; injectable for tests.

    Raises:
        ValueError: no layer, names of another number, fewer than two sizes, or an optimizer of unknown state.
        TypeError: the example holds no batched tensor.
        torch.OutOfMemoryError: a layer does not fit with the largest micro-batch.
        RuntimeError: a layer fails; the message names it.
    """
    if repeats < 1 or warm_ups < 0:
        raise ValueError(f"repeats={repeats} must be >= 1 and warm_ups={warm_ups} >= 0")
    walk = _Walk(layers, names, example, micro_samples, call)
    timer = timer or Timer(walk.device)
    key = ""
    if cache_folder is not None:
        key = profile_key(layers, example, names=walk.names, micro_samples=walk.sizes, call=call)
        if (found := _find(cache_folder, key, len(layers))) is not None:
            return _model(walk, found, optimizer, before, head)
    known: dict[tuple[str, str, int], Times] = {}

    def timed(trial: Trial, samples: int) -> Times:
        shapes = str([shape_of(leaf) for leaf in tree_leaves(trial.value)])
        kind = (structure_of(trial.layer, exact=True), shapes, samples)
        if kind not in known:
            known[kind] = trial.time(timer, repeats, warm_ups)
        return known[kind]

    with _nothing_changed(walk.device):
        measured = walk.measure(timed)
    if cache_folder is not None:
        cache.save(cache_folder, CACHE_KIND, key, {"layers": [layer_to_plain(layer) for layer in measured]})
    return _model(walk, measured, optimizer, before, head)


def estimate_on_meta(
    layers: Sequence[nn.Module],
    example: Any,
    *,
    flops_per_s: float,
    bytes_per_s: float = float("inf"),
    names: Sequence[str] | None = None,
    micro_samples: Sequence[int] | None = None,
    optimizer: OptimizerSpec = None,
    before: LayerCost | None = None,
    head: LayerCost | None = None,
    call: Call = _call,
) -> ModelCost:
    """Estimates the layers' costs for a device that is not there: nothing is computed and no memory is used.

    Seconds are FLOPs of matrix products, convolutions and attention (`torch.utils.flop_counter`) by ``flops_per_s``,
    plus the bytes of input, output and parameters (backward: twice) by ``bytes_per_s``, which stands for all else.

    Args:
        flops_per_s: of the device of speed 1, as reached in practice.
        bytes_per_s: of its memory; left out: traffic takes no time.
        layers, example, names, micro_samples, optimizer, before, head, call: see `profile_on_device`; layers and
            example may be anywhere, the meta device included.

    Raises:
        ValueError: see `profile_on_device`; or a rate that is not positive.
        TypeError: see `profile_on_device`.
        RuntimeError: a layer needs values (data-dependent shapes, tensors of its own making on another device).
    """
    for name, rate in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
        if not rate > 0.0:
            raise ValueError(f"{name}={rate!r} must be > 0")
    walk = _Walk(layers, names, example, micro_samples, call, device=torch.device("meta"))

    def counted(trial: Trial, samples: int) -> Times:
        forward, backward = trial.count_flops()
        traffic_s = trial.traffic_bytes() / bytes_per_s
        factor = 2.0 if trial.goes_back else 0.0
        return forward / flops_per_s + traffic_s, backward / flops_per_s + factor * traffic_s

    with _nothing_changed(walk.device):
        return _model(walk, walk.measure(counted), optimizer, before, head)


def profile_key(
    layers: Sequence[nn.Module],
    example: Any,
    *,
    micro_samples: Sequence[int],
    names: Sequence[str] | None = None,
    call: Call = _call,
) -> str:
    """Returns the key of a profile: structure, input's shapes, sizes, device, autocast and torch's version.

    Weights, optimizer and random state do not count.
    """
    device = tensors_of([one.value for one in example.values()] if _is_by_size(example) else example)[0].device
    where = device_of(device).name()
    if not device_of(device).asynchronous:  # the name of a CPU says little: the host's does
        where = f"{platform.node()}, {where}, {torch.get_num_threads()} threads"
    autocast = torch.is_autocast_enabled(device.type) and str(torch.get_autocast_dtype(device.type))
    caller = f"{call.__module__}.{getattr(call, '__qualname__', type(call).__qualname__)}"
    sizes = [example] if not _is_by_size(example) else [[one.key, one.value] for one in example.values()]
    shapes = [shape_of(leaf) for leaf in tree_leaves(sizes)]
    structures = [structure_of(layer) for layer in layers]
    software = [VERSION, torch.__version__, caller]
    return cache.key_of([software, where, autocast, list(names or ()), list(micro_samples), shapes, structures])


# ---- the walk along the layers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measured:
    """One layer at one size."""

    samples: int
    times: Times
    kept_bytes: int
    output_bytes: int


class _Walk:
    """Takes an example through the layers, at every micro-batch size.

    Args:
        device: where to, if not where the layers and the example are.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Sequence[str] | None,
        example: Any,
        micro_samples: Sequence[int] | None,
        call: Call,
        device: torch.device | None = None,
    ) -> None:
        if not layers:
            raise ValueError("layers is empty: a backbone needs at least one layer")
        self.layers = list(layers)
        self.names = [str(i) for i in range(len(layers))] if names is None else list(names)
        if len(self.names) != len(self.layers):
            raise ValueError(f"names={self.names} must be one per layer: there are {len(self.layers)} layers")
        if _is_by_size(example):
            largest = tensors_of(example[max(example)].value)
            self.device = device or largest[0].device
            self.sizes = sorted(example)
            self.examples = {n: _moved(one, self.device) for n, one in example.items()}
            self.input_bytes = tensor_bytes(largest) / self.sizes[-1]
        else:
            self._resize(example, micro_samples, call, device)
        if len(self.sizes) < 2 or self.sizes[0] < 1:
            raise ValueError(
                f"micro_samples={self.sizes} must be two or more different sizes >= 1: one size cannot tell a fixed"
                " time from a time per sample"
            )

    def _resize(
        self, example: Any, micro_samples: Sequence[int] | None, call: Call, device: torch.device | None
    ) -> None:
        batched = _batched(example)
        rows = batched[0].shape[0]
        self.device = device or batched[0].device
        most = max(rows, 8)
        self.sizes = sorted({int(n) for n in ((most // 4, most) if micro_samples is None else micro_samples)})
        self.examples = {
            n: Example(_resized(example, n, rows, self.device), call) for n in self.sizes if n > 0
        }
        # What is not batched travels with every micro-batch; as for the layers, the largest one counts.
        fixed_bytes = tensor_bytes(tensors_of(example)) - tensor_bytes(batched)
        self.input_bytes = tensor_bytes(batched) / rows + fixed_bytes / max(1, self.sizes[-1])

    def measure(self, times: Callable[[Trial, int], Times]) -> list[LayerCost]:
        """Returns the layers' costs without parameters and state, which need no measuring."""
        by_size = [self._at(samples, times) for samples in self.sizes]
        return [_cost(name, seen) for name, seen in zip(self.names, zip(*by_size, strict=True), strict=True)]

    def _at(self, samples: int, times: Callable[[Trial, int], Times]) -> Iterator[_Measured]:
        value, call = self.examples[samples].value, self.examples[samples].call
        held: list[Tensor] = []  # those of the value's tensors which layers before keep
        for name, layer in zip(self.names, self.layers, strict=True):
            with _named(name, samples):
                trial = Trial(layer, value, call, self.device)
                seen = trial.observe(held)
                measured = _Measured(samples, times(trial, samples), seen.kept_bytes, seen.output_bytes)
                del trial  # and its copy of the layer, before there is another one's
            yield measured
            value, held = seen.value, seen.held


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


def _model(
    walk: _Walk,
    measured: Sequence[LayerCost],
    optimizer: OptimizerSpec,
    before: LayerCost | None,
    head: LayerCost | None,
) -> ModelCost:
    layers = tuple(
        replace(cost, param_bytes=trained_bytes(layer), state_bytes=state_bytes(layer, optimizer))
        for layer, cost in zip(walk.layers, measured, strict=True)
    )
    if before is None:
        before = LayerCost(name="before", forward=_ZERO, backward=_ZERO, output_bytes=walk.input_bytes)
    return ModelCost(layers=layers, before=before, head=head or LayerCost(name="head", forward=_ZERO, backward=_ZERO))


def _find(folder: str | Path, key: str, count: int) -> list[LayerCost] | None:
    found = cache.load(folder, CACHE_KIND, key)
    try:
        layers = None if found is None else [layer_from_plain(layer) for layer in found["layers"]]
    except (KeyError, TypeError, ValueError):  # written by something else
        return None
    return layers if layers is not None and len(layers) == count else None


# ---- values ----------------------------------------------------------------------------------------------------


def _batched(example: Any) -> list[Tensor]:
    """Returns the tensors that have the batch's first dimension."""
    tensors = tensors_of(example)
    rows = next((t.shape[0] for t in tensors if t.ndim), 0)
    if rows < 1:
        kind = type(example).__name__
        raise TypeError(f"example is a {kind} without a tensor whose first dimension counts one or more samples")
    return [t for t in tensors if t.ndim and t.shape[0] == rows]


def _is_by_size(example: Any) -> bool:
    return isinstance(example, Mapping) and all(isinstance(one, Example) for one in example.values())


def _moved(example: Example, device: torch.device) -> Example:
    """Returns the example on a device, in storages of its own."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)

    return replace(example, value=tree_map(move, example.value))


def _resized(example: Any, samples: int, rows: int, device: torch.device) -> Any:
    """Returns the example with as many samples, cut or repeated, in storages of its own."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        moved = leaf.detach().to(device)
        if leaf.ndim and leaf.shape[0] == rows:
            moved = moved.index_select(0, torch.arange(samples, device=device) % rows)
        return moved.requires_grad_(leaf.requires_grad)

    return tree_map(resize, example)


@contextmanager
def _named(name: str, samples: int) -> Iterator[None]:
    """Says which layer failed."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"layer {name!r} does not fit with {samples} samples: profile smaller micro_samples ({error})"
        raise torch.OutOfMemoryError(message) from error
    except Exception as error:
        raise RuntimeError(f"layer {name!r} fails with {samples} samples: {error}") from error


@contextmanager
def _nothing_changed(device: torch.device) -> Iterator[None]:
    """Gradients on; generators of random numbers are put back afterwards."""
    with nothing_drawn(device), torch.inference_mode(False), torch.enable_grad():
        yield
