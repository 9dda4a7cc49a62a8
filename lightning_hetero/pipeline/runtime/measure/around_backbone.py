"""What a training step costs before its backbone and behind it, and what it calls it with; or as a whole (layer T).

    start ──before──► call 0 ──(layers)──► reply ──behind──► call 1 ... ──behind──► loss ──backward──► ... ──► inputs

The step itself runs, unchanged, as it will run in the pipeline. What it computes is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.runtime.measure.layers import detached, tensors_of
from lightning_hetero.pipeline.runtime.measure.memory import (
    Kept,
    optimizer_bytes,
    resident,
    state_bytes,
    tensor_bytes,
    trained_bytes,
)
from lightning_hetero.pipeline.runtime.step.cut import BackboneCall, BackboneCut, graphs_to_retain
from lightning_hetero.pipeline.runtime.step.layer_calls.route import PLAIN, Route, RoutedCall
from lightning_hetero.pipeline.runtime.step.random_streams import stream_seed
from lightning_hetero.pipeline.runtime.step.resumable import ResumableStep, Suspended
from lightning_hetero.pipeline.runtime.step.tensor_trees import loss_of
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, LayerCost, ModelCost


class NeverCalledError(RuntimeError):
    """The step does not call the backbone."""


REPEATS = (3, 3)  # runs of the smaller and the larger size, whose median counts, after one that does not
_LEAST, _ENOUGH_S = 4, 0.25  # runs of a size, and how long these take before more of them are left out


class _Seen(NamedTuple):
    """One size.

    Attributes:
        samples: the size.
        times: before the backbone forward and backward, and behind it forward and backward [s].
        kept_bytes: before the backbone, and behind it.
        route, message: of the first call of the backbone.
        calls: of the backbone.
        series_s: whole runs, one after the other [s].
    """

    samples: int
    times: tuple[float, ...]
    kept_bytes: tuple[int, int]
    route: Route
    message: Any
    calls: int
    series_s: tuple[float, ...] = ()


def measure_outside(
    bodies: Sequence[tuple[int, Callable[[], Any]]], *, cut: BackboneCut, layers: Sequence[nn.Module],
    parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor], copies: Mapping[int, int], device: torch.device,
    repeats: tuple[int, int] = REPEATS,
) -> tuple[LayerCost, LayerCost, int, dict[int, tuple[Route, Any]]]:  # fmt: skip
    """Measures the step outside of the backbone.

    Returns what stands before the first call of the backbone, with all parameters outside of the layers; the head,
    which is all the rest, loss and what lies between several calls included; the number of calls in one step; and by
    samples, how the layers are called in the first one, and what the first of them is handed, see `Route.pack`.

    Gradients are None afterwards; what else a step changes is put back by a `Snapshot`.

    Args:
        bodies: samples and step, e.g. ``(8, lambda: module.training_step(batch_of_8, 0))``; two sizes or more.
        cut: at the backbone.
        layers: of the backbone, in order.
        parameters: outside of the layers.
        buffers: outside of the layers, e.g. statistics of a BatchNorm that stands there.
        copies: of parameters that the optimizer keeps, see `state_copies`.
        device: where the step runs; layers that are elsewhere go there one at a time, in copies.
        repeats: how often the smaller and the larger size run at most, after one run that does not count.

    Raises:
        RuntimeError: the step never calls the backbone, or not as often with every size.
        ValueError: fewer than two sizes.
    """
    inside = [p for layer in layers for p in layer.parameters()]
    seen = _Bench(cut, layers, [*parameters, *inside], Timer(device)).measure(bodies, repeats)
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
        name="before", forward=_fit(seen, 0), backward=_fit(seen, 1), param_bytes=tensor_bytes(trained),
        state_bytes=held + optimizer_bytes(trained, copies), activation_bytes=last.kept_bytes[0] / last.samples,
        output_bytes=tensor_bytes(tensors_of(last.message)) / last.samples,
    )  # fmt: skip
    head = LayerCost(
        name="head", forward=_fit(seen, 2), backward=_fit(seen, 3),
        activation_bytes=last.kept_bytes[1] / last.samples,
    )  # fmt: skip
    first = {s.samples: (s.route, s.message) for s in seen}
    return before, head, last.calls, first


def measure_whole(
    bodies: Sequence[tuple[int, Callable[[], Any]]], *, module: nn.Module, name: str, copies: Mapping[int, int],
    device: torch.device, repeats: tuple[int, int] = REPEATS,
) -> tuple[ModelCost, tuple[float, ...]]:  # fmt: skip
    """Measures forward and backward of training steps whose layers are not known: the whole module is the one layer.

    Args:
        bodies, copies, device, repeats: see `measure_outside`, which leaves the same changed.
        module: on the device.
        name: of the layer.

    Returns:
        The costs, and the seconds of successive steps of the larger size.

    Raises:
        ValueError: fewer than two sizes.
        torch.OutOfMemoryError: the step does not fit.
    """
    seen = _Bench(nullcontext(), (), list(module.parameters()), Timer(device)).measure(bodies, repeats)
    layer = LayerCost(
        name=name, forward=_fit(seen, 0), backward=_fit(seen, 3), param_bytes=trained_bytes(module),
        state_bytes=state_bytes(module, copies), activation_bytes=sum(seen[-1].kept_bytes) / seen[-1].samples,
    )  # fmt: skip
    free = AffineCost(fixed_s=0.0, per_sample_s=0.0)
    before, head = (LayerCost(name=end, forward=free, backward=free) for end in ("before", "head"))
    return ModelCost(layers=(layer,), before=before, head=head), seen[-1].series_s


def count_calls(
    body: Callable[[], Any], *, cut: BackboneCut, layers: Sequence[nn.Module], device: torch.device
) -> int:
    """Runs a training step forward; returns how often it calls the backbone."""
    calls = 0
    with closing(ResumableStep(body, seed=stream_seed(0, 0))) as step, cut, torch.enable_grad():
        outcome = step.start()
        while isinstance(outcome, Suspended):
            calls += 1
            outcome = step.resume(outcome.value.reply(_through(layers, outcome.value, device)))
    return calls


def _fit(seen: Sequence[_Seen], time: int) -> AffineCost:
    return fit_affine([s.samples for s in seen], [s.times[time] for s in seen])


@dataclass(frozen=True, slots=True)
class _Bench:
    """Runs steps and takes the time."""

    cut: AbstractContextManager[Any]
    layers: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]
    timer: Timer

    def measure(self, bodies: Sequence[tuple[int, Callable[[], Any]]], repeats: tuple[int, int]) -> list[_Seen]:
        """Returns the medians over the runs of each size, the largest last."""
        if len({samples for samples, _ in bodies}) < 2:
            raise ValueError("bodies must be of two or more sizes: one cannot tell a fixed time from a time per sample")
        found: list[_Seen] = []
        for (samples, body), count in zip(sorted(bodies, key=lambda one: one[0]), repeats, strict=True):
            runs = self.runs(samples, body, count)
            times = tuple(map(median, zip(*(run.times for run in runs), strict=True)))
            found.append(runs[-1]._replace(times=times, series_s=tuple(sum(run.times) for run in runs)))
        return found

    def runs(self, samples: int, body: Callable[[], Any], count: int) -> list[_Seen]:
        """Returns so many runs, after one that does not count; where they take long, fewer."""
        try:
            with torch.enable_grad():
                self.timer.warm_up(lambda: self._run(samples, body))
                self._run(samples, body)
                until_s, found = time.perf_counter() + _ENOUGH_S, list[_Seen]()
                while len(found) < (count if time.perf_counter() < until_s else min(count, _LEAST)):
                    found.append(self._run(samples, body))
                return found
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def _run(self, samples: int, body: Callable[[], Any]) -> _Seen:
        step = ResumableStep(body, seed=stream_seed(0, samples))
        calls: list[BackboneCall] = []
        forward: list[tuple[Any, Any]] = []  # before, then behind each call
        backward: list[tuple[Any, Any]] = []
        kept = Kept(self.parameters)
        try:
            with self.cut, kept:
                outcome = self._timed(forward, step.start)
                before_bytes = kept.size_bytes()
                while isinstance(outcome, Suspended):
                    calls.append(outcome.value)
                    reply = calls[-1].reply(_through(self.layers, calls[-1], self.timer.device))
                    outcome = self._timed(forward, step.resume, reply)
        finally:
            step.close()
        route, message = (calls[0].route, detached(calls[0].value)) if calls else (PLAIN, None)
        loss = loss_of(outcome.value)
        head_bytes = kept.size_bytes() - before_bytes
        retain, *retains = graphs_to_retain(loss, calls)
        if loss.requires_grad:
            self._timed(backward, loss.sum().backward, retain_graph=retain)
        for call, keep in zip(reversed(calls), retains, strict=True):
            if call.grad_enabled:
                call.output_grads()
                grads = [torch.zeros_like(t) if t.requires_grad else None for t in call.inputs]
                self._timed(backward, call.backward, grads, retain_graph=keep)
        before_s, *behind_s = [self.timer.seconds(*span) for span in forward]
        *back_s, last_s = [self.timer.seconds(*span) for span in backward] or [0.0]
        if calls and calls[0].grad_enabled:  # the last way back leads through what is before the backbone
            times = before_s, last_s, sum(behind_s), sum(back_s)
        else:
            times = before_s, 0.0, sum(behind_s), sum(back_s) + last_s
        return _Seen(samples, times, (before_bytes, head_bytes), route, message, len(calls))

    def _timed(self, spans: list[tuple[Any, Any]], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a function returns, and adds when it began and ended: read when all calls are made."""
        start = self.timer.mark()
        found = function(*args, **kwargs)
        spans.append((start, self.timer.mark()))
        return found


def _through(layers: Sequence[nn.Module], call: BackboneCall, device: torch.device) -> Any:
    """Returns the backbone's output; nothing is kept for a backward pass."""
    with torch.no_grad():
        value, through = call.value, RoutedCall(call.route, layers)
        for layer in layers:
            with resident(layer, device):
                value = through(layer, value)
        return value
