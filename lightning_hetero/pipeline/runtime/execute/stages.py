"""One rank's layers: forward now, backward later, for many micro-batches in flight (layer T).

    outputs, flight = stage.forward(value, [True], Pass(...))        # of the stage before, detached
    ...
    input_grads = flight.backward(output_grads)                      # once; parameters' gradients add up in .grad

Between the two lives what autograd saved, and nothing else: neither the outputs nor their gradients are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.measure.device import nothing_drawn
from lightning_hetero.pipeline.runtime.execute.messages import Pass
from lightning_hetero.pipeline.runtime.measure.layer_clock import LayerClock
from lightning_hetero.pipeline.runtime.step.cut import GraphInput
from lightning_hetero.pipeline.runtime.step.random_streams import layer_seed, seed_streams, stream_seed
from lightning_hetero.pipeline.runtime.step.tensor_trees import split
from lightning_hetero.pipeline.runtime.step.torch_state import Switches, enabled_autocast


class Flight:
    """What a stage keeps of a micro-batch from forward to backward.

    Attributes:
        input_flags: which tensors of the input want a gradient, in order.
        output_flags: which tensors of the outputs require one.
    """

    def __init__(
        self, graph_input: GraphInput | None, input_flags: Sequence[bool], outputs: Sequence[Tensor], *,
        grad_enabled: bool, clock: LayerClock | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self.input_flags = tuple(input_flags)
        self.output_flags = tuple([grad_enabled and tensor.requires_grad for tensor in outputs])
        self._graph_input = graph_input
        self._grads: list[Tensor | None] = []
        roots = [tensor for tensor, flag in zip(outputs, self.output_flags, strict=True) if flag]
        self._end: Tensor | None = None
        if roots:
            with torch.enable_grad():
                self._end = _Depart.apply(self._grads, *roots)

    def backward(self, output_grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Takes the gradients of the outputs' tensors through the layers; once.

        Args:
            output_grads: None without a gradient; ignored where no gradient is required. None: no gradients at all.

        Returns:
            The gradients of the input's tensors; None without a gradient.
        """
        end, self._end = self._end, None
        grads = (None,) * len(self.output_flags) if output_grads is None else output_grads
        wanted = [grad for grad, flag in zip(grads, self.output_flags, strict=True) if flag]
        if end is not None and any(grad is not None for grad in wanted):
            self._grads += wanted
            del wanted, grads, output_grads
            if self._clock is not None:
                self._clock.goes_back()
            torch.autograd.backward([end], [torch.empty_like(end)])
            if self._clock is not None:
                self._clock.is_back()
        graph_input, self._graph_input = self._graph_input, None
        return graph_input.take_grads() if graph_input is not None else [None] * len(self.input_flags)


class _Depart(torch.autograd.Function):
    """Ends a graph in place of its outputs, so that their memory is free as soon as they have been sent."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor | None], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads = tuple(ctx.grads)
        ctx.grads.clear()
        return (None, *grads)


class Stage:
    """The layers of one rank.

    Args:
        layers: by index in the backbone, in order.
        last: whether the backbone ends with them.
        seed: of the run. A layer draws from ``layer_seed(stream_seed(seed, step, number), index)``, of a later call of
            the backbone with the call's number behind that of the micro-batch: so what is drawn does not depend on the
            plan.
        checkpoint_layers: keep the layers' inputs only, and compute each layer once more in backward. BatchNorm then
            updates its statistics twice.
        device: where the layers are; of autocast.
        clock: times the layers of passes with gradients.

    Attributes:
        timed: whether it does so now.
    """

    def __init__(
        self, layers: Mapping[int, nn.Module], *, last: bool, seed: int, checkpoint_layers: bool,
        device: torch.device, clock: LayerClock | None = None,
    ) -> None:  # fmt: skip
        self._clock, self.timed = clock, True
        self._layers, self._end = dict(layers), max(layers) + 1
        self._last, self._seed = last, seed
        self._checkpoint_layers, self._device = checkpoint_layers, device

    def forward(self, value: Any, flags: Sequence[bool], way: Pass) -> tuple[Any, Flight]:
        """Runs the layers.

        Args:
            value: what the first of them is handed, see `Route.pack`; its tensors are detached.
            flags: which of the tensors want a gradient, in order.
            way: circumstances.

        Returns:
            What the next stage is handed, or behind the last layer its output, detached; and what is needed to go back.
        """
        tensors, joined = split(value)
        graph_input = None
        if way.grad_enabled and any(flags):
            graph_input = GraphInput(tensors, flags)
            tensors = graph_input.take()
        value = joined(tensors)
        del tensors
        base = stream_seed(self._seed, way.step, way.number, *((way.call,) if way.call else ()))
        route, clock = way.route, self._clock if self.timed and way.grad_enabled else None
        with torch.set_grad_enabled(way.grad_enabled), self._autocast(way.autocast):
            first = next(iter(self._layers))
            previous, inputs = route.unpack(first, value)
            del value
            output: Any = None
            if clock is not None:
                clock.begins()
            for index, layer in self._layers.items():
                if index > first:
                    previous = route.taken(index, output)
                    del output
                output = self._run(index, layer, layer_seed(base, index), previous, inputs, way)
                if clock is not None:
                    clock.returned(index, output)
            if not self._last:
                output = route.pack(self._end, route.taken(self._end, output), inputs)
            del previous, inputs
        tensors, joined = split(output)
        flight = Flight(graph_input, flags, tensors, grad_enabled=way.grad_enabled, clock=clock)
        del output
        return joined([tensor.detach() for tensor in tensors]), flight

    def in_place(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, step: int, number: int, again: bool = False
    ) -> Any:
        """Runs the layers where they are called, as a part of the caller's graph; for the only stage of a group.

        Args:
            args, kwargs: of the backbone's only call in its step.
            step, number: see `Pass`.
            again: in backward, what has been computed before.

        Returns:
            The output of the last layer.
        """
        grad_enabled = torch.is_grad_enabled()
        clock = self._clock if self.timed and grad_enabled and not again else None
        if clock is not None:
            clock.begins([*args, *kwargs.values()])
        output: Any = None
        base, again_in_backward = stream_seed(self._seed, step, number), self._checkpoint_layers and grad_enabled
        for index, layer in self._layers.items():
            output = _computed(layer, layer_seed(base, index), args, kwargs, again_in_backward=again_in_backward)
            if clock is not None:
                clock.returned(index, output)
            args, kwargs = (output,), {}
        return output

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Inside, the backward pass of what `in_place` has computed is timed."""
        clock = self._clock if self.timed else None
        if clock is not None:
            clock.goes_back()
        yield
        if clock is not None:
            clock.is_back()

    def _run(
        self, index: int, layer: nn.Module, seed: int, previous: Sequence[Any], inputs: Mapping[int, Tensor], way: Pass
    ) -> Any:
        call = way.route.call(index)
        args, kwargs = call.arguments(previous, inputs, self._device)
        if call.no_grad:
            with torch.no_grad():
                return _seeded(layer, seed, *args, **kwargs)
        again = (self._checkpoint_layers or call.recompute) and way.grad_enabled
        return _computed(layer, seed, args, kwargs, again_in_backward=again)

    def _autocast(self, wanted: Mapping[str, torch.dtype]) -> AbstractContextManager[Any]:
        """Puts autocast as wanted, whatever is in force around."""
        kinds = {"cpu", self._device.type} & {*wanted, *enabled_autocast()}
        if not kinds:
            return nullcontext()
        stack = ExitStack()
        for kind in sorted(kinds):
            dtype = wanted.get(kind)
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        return stack


def _computed(
    layer: nn.Module, seed: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, again_in_backward: bool
) -> Any:
    if again_in_backward:
        # Seeded, it draws the same when it is computed again: no states of generators need be kept.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(_seeded, layer, seed, *args, **options, **kwargs)
    return _seeded(layer, seed, *args, **kwargs)


def _seeded(layer: nn.Module, seed: int, /, *args: Any, **kwargs: Any) -> Any:
    seed_streams(seed)
    return layer(*args, **kwargs)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Puts the caller's random streams and switches back afterwards: layers are seeded before they run."""
    switches = Switches.now()
    with nothing_drawn():
        try:
            yield
        finally:
            switches.put()
