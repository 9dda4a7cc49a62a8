"""What a training step costs before its backbone and behind it, and what it calls it with; or as a whole (layer T).

    start ──before──► call 0 ──(layers)──► reply ──behind──► call 1 ... ──behind──► loss ──backward──► ... ──► inputs

The step itself runs, unchanged, as it will run in the pipeline. What it computes is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.layers import detached, tensors_of
from lightning_hetero.pipeline.runtime.measure.memory import (
    Kept,
    OptimizerSpec,
    optimizer_bytes,
    resident,
    state_bytes,
    tensor_bytes,
    trained_bytes,
)
from lightning_hetero.pipeline.runtime.step.cut import BackboneCall, BackboneCut, graphs_to_retain
from lightning_hetero.pipeline.runtime.step.layer_calls.route import PLAIN, Route, RoutedCall
from lightning_hetero.pipeline.runtime.step.random_streams import nothing_drawn
from lightning_hetero.pipeline.runtime.step.resumable import (
    Carrier,
    ResumableStep,
    Suspended,
    stream_seed,
)
from lightning_hetero.pipeline.runtime.step.tensor_trees import loss_of
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, LayerCost, ModelCost


class NeverCalledError(RuntimeError):
    """The step does not call the backbone."""


_REPEATS = 3  # runs per size, whose median counts, after one that does not


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """What stands around the backbone.

    Attributes:
        before: the step up to its first call of the backbone; holds all parameters outside of the layers.
        head: all the rest, loss included; several calls: what lies between them, too.
        calls: of the backbone in one step.
        first: by samples, how the layers are called in the first call, and what the first of them is handed, see
            `Route.pack`.
    """

    before: LayerCost
    head: LayerCost
    calls: int
    first: Mapping[int, tuple[Route, Any]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One size."""

    samples: int
    before_s: tuple[float, float]  # forward, backward
    head_s: tuple[float, float]
    before_bytes: int
    head_bytes: int
    route: Route
    message: Any
    calls: int


def measure_outside(
    bodies: Sequence[tuple[int, Callable[[], Any]]],
    *,
    cut: BackboneCut,
    layers: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[Tensor],
    optimizer: OptimizerSpec,
    device: torch.device,
) -> Outside:
    """Measures the step outside of the backbone.

    Gradients of all parameters, the buffers named, and torch's random streams are afterwards as before.

    Args:
        bodies: samples and step, e.g. ``(8, lambda: module.training_step(batch_of_8, 0))``; two sizes or more.
        cut: at the backbone.
        layers: of the backbone, in order.
        parameters: outside of the layers.
        buffers: outside of the layers, e.g. statistics of a BatchNorm that stands there.
        optimizer: for the size of its state, see `optimizer_bytes`.
        device: where the step runs; layers that are elsewhere go there one at a time, in copies.

    Raises:
        RuntimeError: the step never calls the backbone, or not as often with every size.
        ValueError: fewer than two sizes.
    """
    inside = [p for layer in layers for p in layer.parameters()]
    with _unchanged([*parameters, *inside], [*buffers, *(b for layer in layers for b in layer.buffers())], device):
        seen = _Bench(cut, layers, [*parameters, *inside], Timer(device)).measure(bodies)
    if len({s.calls for s in seen}) > 1:
        counts = {s.samples: s.calls for s in seen}
        raise RuntimeError(
            f"training_step calls the backbone {counts} times (by samples): that must not depend on the batch"
        )
    last = seen[-1]
    if not last.calls:
        raise NeverCalledError(
            "training_step ended without calling the backbone: is `backbone=` the attribute whose layers it runs?"
        )
    trained = [p for p in parameters if p.requires_grad]
    held = tensor_bytes([*parameters, *buffers]) + tensor_bytes(trained)
    before = LayerCost(
        name="before",
        forward=_fit(seen, lambda s: s.before_s[0]),
        backward=_fit(seen, lambda s: s.before_s[1]),
        param_bytes=tensor_bytes(trained),
        state_bytes=held + optimizer_bytes(trained, optimizer),
        activation_bytes=last.before_bytes / last.samples,
        output_bytes=tensor_bytes(tensors_of(last.message)) / last.samples,
    )
    head = LayerCost(
        name="head",
        forward=_fit(seen, lambda s: s.head_s[0]),
        backward=_fit(seen, lambda s: s.head_s[1]),
        activation_bytes=last.head_bytes / last.samples,
    )
    first = {s.samples: (s.route, s.message) for s in seen}
    return Outside(before=before, head=head, calls=last.calls, first=first)


def measure_whole(
    bodies: Sequence[tuple[int, Callable[[], Any]]],
    *,
    module: nn.Module,
    name: str,
    optimizer: OptimizerSpec,
    device: torch.device,
) -> ModelCost:
    """Measures forward and backward of training steps whose layers are not known: the whole module is the one layer.

    Gradients and torch's random streams are afterwards as before; all else that a step changes is not, see `Snapshot`.

    Args:
        bodies, optimizer, device: see `measure_outside`.
        module: on the device.
        name: of the layer.

    Raises:
        ValueError: fewer than two sizes.
        torch.OutOfMemoryError: the step does not fit.
    """
    parameters = list(module.parameters())
    with _unchanged(parameters, (), device):
        seen = _Bench(nullcontext(), (), parameters, Timer(device)).measure(bodies)
    layer = LayerCost(
        name=name,
        forward=_fit(seen, lambda s: s.before_s[0]),
        backward=_fit(seen, lambda s: s.head_s[1]),
        param_bytes=trained_bytes(module),
        state_bytes=state_bytes(module, optimizer),
        activation_bytes=(seen[-1].before_bytes + seen[-1].head_bytes) / seen[-1].samples,
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
    with _unchanged(parameters, (), device):
        runs = _Bench(nullcontext(), (), parameters, Timer(device)).runs(0, body, steps)
    return [sum(run.before_s) + sum(run.head_s) for run in runs]


def count_calls(
    body: Callable[[], Any],
    *,
    cut: BackboneCut,
    layers: Sequence[nn.Module],
    device: torch.device,
) -> int:
    """Runs a training step forward; returns how often it calls the backbone."""
    calls = 0
    with Carrier() as carrier, cut, torch.enable_grad():
        step = ResumableStep(body, carrier=carrier, seed=stream_seed(0, 0))
        outcome = step.start()
        while isinstance(outcome, Suspended):
            calls += 1
            outcome = step.resume(outcome.value.reply(_through(layers, outcome.value, device)))
    return calls


def _fit(seen: Sequence[_Seen], value: Callable[[_Seen], float]) -> AffineCost:
    return fit_affine([s.samples for s in seen], [value(s) for s in seen])


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs steps and takes the time."""

    cut: AbstractContextManager[Any]
    layers: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]
    timer: Timer

    def measure(self, bodies: Sequence[tuple[int, Callable[[], Any]]]) -> list[_Seen]:
        """Returns the medians over the runs of each size, the largest last."""
        if len({samples for samples, _ in bodies}) < 2:
            raise ValueError("bodies must be of two or more sizes: one cannot tell a fixed time from a time per sample")
        found: list[_Seen] = []
        for samples, body in sorted(bodies, key=lambda one: one[0]):
            runs = self.runs(samples, body, _REPEATS)
            before_s, head_s = ([getattr(r, name) for r in runs] for name in ("before_s", "head_s"))
            found.append(replace(runs[-1], before_s=_medians(before_s), head_s=_medians(head_s)))
        return found

    def runs(self, samples: int, body: Callable[[], Any], count: int) -> list[_Seen]:
        """Returns so many runs, after one that does not count."""
        with Carrier() as carrier:
            self.timer.warm_up(lambda: self._run(samples, body, carrier))
            return [self._run(samples, body, carrier) for _ in range(1 + count)][1:]

    def _run(self, samples: int, body: Callable[[], Any], carrier: Carrier) -> _Seen:
        timer = self.timer
        step = ResumableStep(body, carrier=carrier, seed=stream_seed(0, samples))
        calls: list[BackboneCall] = []
        spans: list[tuple[Any, Any]] = []  # of the forward: before, then behind each call
        kept = Kept(self.parameters)
        try:
            with self.cut, kept:
                start = timer.mark()
                outcome = step.start()
                spans.append((start, timer.mark()))
                before_bytes = kept.size_bytes()
                while isinstance(outcome, Suspended):
                    calls.append(outcome.value)
                    reply = calls[-1].reply(_through(self.layers, calls[-1], timer.device))
                    start = timer.mark()
                    outcome = step.resume(reply)
                    spans.append((start, timer.mark()))
        finally:
            step.close()
        route, message = (calls[0].route, detached(calls[0].value)) if calls else (PLAIN, None)
        loss = loss_of(outcome.value)
        head_bytes = kept.size_bytes() - before_bytes
        retain = graphs_to_retain(loss, calls)
        start = timer.mark()
        if loss.requires_grad:
            loss.sum().backward(retain_graph=retain[0])
        back = [(start, timer.mark())]
        for call, keep in zip(reversed(calls), retain[1:], strict=True):
            if call.grad_enabled:
                call.output_grads()
                grads = [torch.zeros_like(t) if t.requires_grad else None for t in call.inputs]
                start = timer.mark()
                call.backward(grads, retain_graph=keep)
                back.append((start, timer.mark()))
        seconds = [timer.seconds(*span) for span in spans]
        back_s = [timer.seconds(*span) for span in back]
        return _Seen(
            samples,
            (seconds[0], back_s[-1] if len(back_s) > 1 else 0.0),
            (sum(seconds[1:]), back_s[0] + sum(back_s[1:-1])),
            before_bytes,
            head_bytes,
            route,
            message,
            len(calls),
        )


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(first for first, _ in pairs), median(second for _, second in pairs)


def _through(layers: Sequence[nn.Module], call: BackboneCall, device: torch.device) -> Any:
    """Returns the backbone's output; nothing is kept for a backward pass."""
    with torch.no_grad():
        value, through = call.value, RoutedCall(call.route, layers)
        for layer in layers:
            with resident(layer, device):
                value = through(layer, value)
        return value


@contextmanager
def _unchanged(parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor], device: torch.device) -> Any:
    """Gradients on; gradients, buffers and random streams are put back afterwards."""
    grads = [(p, p.grad) for p in parameters]
    values = [(b, b.clone()) for b in buffers]
    for p, _ in grads:
        p.grad = None
    try:
        with nothing_drawn(device), torch.enable_grad():
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
