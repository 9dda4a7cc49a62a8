"""What a training step costs as a whole, where its layers are not known (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.memory import (
    Kept,
    OptimizerSpec,
    optimizer_bytes,
    tensor_bytes,
)
from lightning_hetero.pipeline.runtime.step.random_streams import nothing_drawn
from lightning_hetero.pipeline.runtime.step.tensor_trees import loss_of
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

__all__ = ["measure_series", "measure_whole"]

_REPEATS = 3  # runs per size, whose median counts, after one that does not


def measure_whole(
    bodies: Sequence[tuple[int, Callable[[], Any]]],
    *,
    module: nn.Module,
    name: str,
    optimizer: OptimizerSpec,
    device: torch.device,
) -> ModelCost:
    """Measures forward and backward of training steps; the whole module is the one layer.

    Gradients and torch's random streams are afterwards as before; all else that a step changes is not, see `Snapshot`.

    Args:
        bodies: samples and step; two sizes or more.
        module: on the device.
        name: of the layer.
        optimizer: for the size of its state, see `optimizer_bytes`.
        device: where all of this is.

    Raises:
        ValueError: fewer than two sizes.
        torch.OutOfMemoryError: the step does not fit.
    """
    if len({samples for samples, _ in bodies}) < 2:
        raise ValueError("bodies must be of two or more sizes: one cannot tell a fixed time from a time per sample")
    timer, parameters = Timer(device), list(module.parameters())
    grads = [(p, p.grad) for p in parameters]
    seen: list[tuple[int, float, float, int]] = []
    try:
        for p in parameters:
            p.grad = None
        with nothing_drawn(device), torch.enable_grad():
            timer.warm_up(lambda: _run(bodies[-1][1], parameters, timer))
            for samples, body in bodies:
                runs = [_run(body, parameters, timer) for _ in range(1 + _REPEATS)][1:]
                forward_s, backward_s = median(r[0] for r in runs), median(r[1] for r in runs)
                seen.append((samples, forward_s, backward_s, runs[-1][2]))
    finally:
        for p, grad in grads:
            p.grad = grad
    sizes = [s[0] for s in seen]
    trained = [p for p in parameters if p.requires_grad]
    largest = max(seen)
    layer = LayerCost(
        name=name,
        forward=fit_affine(sizes, [s[1] for s in seen]),
        backward=fit_affine(sizes, [s[2] for s in seen]),
        param_bytes=tensor_bytes(trained),
        state_bytes=tensor_bytes([*parameters, *module.buffers()])
        + tensor_bytes(trained)
        + optimizer_bytes(trained, optimizer),
        activation_bytes=largest[3] / largest[0],
    )
    free = AffineCost(fixed_s=0.0, per_sample_s=0.0)
    ends = [LayerCost(name=end, forward=free, backward=free) for end in ("before", "head")]
    return ModelCost(layers=(layer,), before=ends[0], head=ends[1])


def measure_series(
    body: Callable[[], Any], *, parameters: Sequence[nn.Parameter], device: torch.device, steps: int
) -> list[float]:
    """Returns the seconds of successive training steps, forward and backward, after one that is not counted.

    Args:
        body: a step.
        parameters, device: see `measure_whole`; what stays changed is the same.
        steps: how many.
    """
    timer, grads = Timer(device), [(p, p.grad) for p in parameters]
    try:
        with nothing_drawn(device), torch.enable_grad():
            timer.warm_up(lambda: _run(body, parameters, timer))
            runs = [_run(body, parameters, timer) for _ in range(1 + steps)][1:]
    finally:
        for p, grad in grads:
            p.grad = grad
    return [forward_s + backward_s for forward_s, backward_s, _ in runs]


def _run(body: Callable[[], Any], parameters: Sequence[nn.Parameter], timer: Timer) -> tuple[float, float, int]:
    """Returns the seconds of forward and backward, and the bytes kept between them."""
    kept = Kept(parameters)
    start = timer.mark()
    with kept:
        loss = loss_of(body())
    middle = timer.mark()
    size_bytes = kept.size_bytes()
    loss.sum().backward()
    return timer.seconds(start, middle), timer.seconds(middle, timer.mark()), size_bytes
