"""The cut: a training step is suspended where it calls the backbone, and its autograd graph is cut there (layer T).

    x = embed(batch)   |   h = x.detach()  ->  the pipeline's stages  ->  y   |   loss = head(y)
                       |   x.backward(h.grad)  <-  the stages  <-  y's grad   |   loss.backward()

Forward, as the runtime sees it; ``module.training_step`` is untouched:

    cut = BackboneCut(module.backbone)
    with cut:
        call = step.start().value                     # a BackboneCall
        y = ...                                       # call.inputs along call.route through the stages
        loss = step.resume(call.reply(y)).value

and back, once for each step, calls in reverse order:

    keep, *keeps = graphs_to_retain(loss, [call])
    loss.backward(retain_graph=keep)
    del loss                                          # frees what was retained for nothing but it
    grads = ...                                       # call.output_grads() back through the stages
    call.backward(grads, retain_graph=keeps[0])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.step.layer_calls.chain import (
    CalledLayer,
    LayerOutput,
    LayerWalk,
    SeenCaches,
    stand_ins,
    without_cache,
)
from lightning_hetero.pipeline.runtime.step.layer_calls.route import Route
from lightning_hetero.pipeline.runtime.step.resumable import current_step
from lightning_hetero.pipeline.runtime.step.tensor_trees import split
from lightning_hetero.pipeline.runtime.step.torch_state import enabled_autocast, saved_tensor_hooks

# ---- where a graph begins anew ---------------------------------------------------------------------------------


class GraphInput:
    """Puts tensors that come from elsewhere at the beginning of a graph, and collects their gradients.

    Not as leaves: what a leaf forbids, such as ``nn.ReLU(inplace=True)`` right behind the cut, must go on working.

    Args:
        tensors: what came; shares their memory, but no graph.
        requires_grad: which of them get a gradient; only floating point and complex ones can.
    """

    def __init__(self, tensors: Sequence[Tensor], requires_grad: Sequence[bool]) -> None:
        self._wanted = [
            want and (tensor.is_floating_point() or tensor.is_complex())
            for tensor, want in zip(tensors, requires_grad, strict=True)
        ]
        self._grads: list[Tensor | None] = [None] * sum(self._wanted)
        self._taken = False
        with torch.enable_grad():
            come = [tensor for tensor, wanted in zip(tensors, self._wanted, strict=True) if wanted]
            placed = iter(_Enter.apply(torch.empty(0, requires_grad=True), self, *map(Tensor.detach, come)))
        self._tensors = [
            next(placed) if wanted else tensor.detach() for tensor, wanted in zip(tensors, self._wanted, strict=True)
        ]

    def take(self) -> list[Tensor]:
        """Returns the tensors to compute on; once, they are not kept."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def take_grads(self) -> list[Tensor | None]:
        """Returns the gradients collected so far, one per tensor: None without a gradient. Once, they are not kept."""
        self._taken = True
        grads = iter(self._grads)
        self._grads = []
        return [next(grads) if wanted else None for wanted in self._wanted]

    def _collect(self, grads: Sequence[Tensor | None]) -> None:
        if self._taken:
            raise RuntimeError(
                "a gradient of the backbone's output comes after it has been sent on: of several calls in one"
                " step, the last must go back first"
            )
        for i, grad in enumerate(grads):
            if grad is not None:
                before = self._grads[i]
                # A copy: autograd may have made the memory of this gradient a parameter's `.grad`, to which the next
                # backward pass adds in place (as it does for x + p.unsqueeze(0) with one row in x).
                self._grads[i] = grad.detach().clone() if before is None else before + grad.detach()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, graph_input: GraphInput, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Without the anchor nothing would need a gradient, and there would be no node.
        ctx.graph_input = graph_input
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.graph_input._collect(grads)
        return (None,) * (2 + len(grads))


# ---- one call --------------------------------------------------------------------------------------------------


class BackboneCall:
    """One call of the backbone by a training step: what goes out, what comes back, and the way back of gradients.

    Outputs may be any nest of tuples, lists, dicts and registered dataclasses with tensors and other values in it. What
    *travels* between processes is one tensor or a (nested) tuple of tensors; messages refuse the rest.

    Attributes:
        number: of the call in its step, from 0.
        route: how the layers are called.
        inputs: the tensors that the layers are called with, by number in the `route`, each once. Detached; they require
            a gradient where the originals did, and share their memory.
        grad_enabled: False where the step called the backbone under ``no_grad``: forward only, nothing to send back.
        autocast: dtype by type of device for which autocast is enabled at the call; the layers belong under the same.
    """

    def __init__(self, number: int, route: Route, inputs: Sequence[Tensor], *, grad_enabled: bool) -> None:
        self.number = number
        self.route = route
        self.grad_enabled = grad_enabled
        self.autocast = enabled_autocast()
        self._sources = list(inputs)
        self.inputs = [source.detach().requires_grad_(grad_enabled and source.requires_grad) for source in inputs]
        self._graph_input: GraphInput | None = None

    @property
    def value(self) -> Any:
        """What the first layer is handed, see `Route.pack`."""
        return self.route.pack(0, (), dict(enumerate(self.inputs)))

    # ---- forward ---------------------------------------------------------------------------------------------------

    def reply(self, outputs: Any, requires_grad: bool | Sequence[bool] = True) -> Any:
        """Returns what the step is to be resumed with: ``outputs``, as the beginning of a new graph.

        Args:
            outputs: of the backbone; any nest as above.
            requires_grad: of each tensor of ``outputs`` in order, or of all; never more than grad mode at the call
                allows. False where neither an input nor a layer is trained.
        """
        tensors, joined = split(outputs)
        flags = [requires_grad] * len(tensors) if isinstance(requires_grad, bool) else requires_grad
        if self.grad_enabled:
            self._graph_input = GraphInput(tensors, flags)
            tensors = self._graph_input.take()
        else:
            tensors = [tensor.detach() for tensor in tensors]
        return _Reply(joined(tensors))

    # ---- back ------------------------------------------------------------------------------------------------------

    def output_grads(self) -> list[Tensor | None]:
        """Returns the gradient of each tensor of the outputs, in order, after ``loss.backward()``; once.

        None where the loss does not depend on it. Not for a call under ``no_grad``, through which nothing goes back.
        """
        assert self._graph_input is not None
        return self._graph_input.take_grads()

    def backward(self, input_grads: Sequence[Tensor | None], *, retain_graph: bool = False) -> None:
        """Lets gradients go on through what the step computed before this call; once.

        Args:
            input_grads: of each of `inputs`, in order; None without a gradient. Ignored where an input requires none.
            retain_graph: see `graphs_to_retain`.
        """
        pairs = zip(self._sources, input_grads, strict=True)
        ways = [(source, grad) for source, grad in pairs if source.requires_grad and grad is not None]
        self._sources, self.inputs = [], []
        if ways:
            torch.autograd.backward([w[0] for w in ways], [w[1] for w in ways], retain_graph=retain_graph)

    def _roots(self) -> list[Any]:
        return [source.grad_fn for source in self._sources if self.grad_enabled and source.grad_fn is not None]


class _Reply:
    """What `BackboneCall.reply` returns: holds the outputs until the step has them, and not as long as it runs on."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def take(self) -> Any:
        """Returns the outputs; once."""
        return self.__dict__.pop("_outputs")


# ---- graphs that overlap ---------------------------------------------------------------------------------------


def graphs_to_retain(loss: Tensor, calls: Sequence[BackboneCall]) -> list[bool]:
    """Returns ``retain_graph`` for the backward of ``loss``, then for those of ``calls`` from the last to the first.

    The graph before the cut is walked twice where the step uses it on another way, too, such as a skip connection
    around the backbone: ``head(y + x)``. Then the first walk must not free it. Elsewhere nothing is retained, which
    also is what compiled graphs want.
    """
    walks = [[loss.grad_fn] if loss.grad_fn is not None else [], *(call._roots() for call in reversed(calls))]
    later: set[Any] = set()
    retain: list[bool] = []
    graphs = [_nodes(roots) for roots in walks] if any(walks[1:]) else [set() for _ in walks]
    for graph in reversed(graphs):
        retain.append(not later.isdisjoint(graph))
        later |= graph
    return retain[::-1]


def _nodes(roots: Sequence[Any]) -> set[Any]:
    """Returns the nodes from which a backward pass frees something."""
    seen: set[Any] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        # Where gradients are collected, nothing is saved: leaves (known by their `variable`) and outputs of a cut.
        if node in seen or hasattr(node, "variable") or isinstance(getattr(node, "graph_input", None), GraphInput):
            continue
        seen.add(node)
        stack += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return seen


# ---- the cut ---------------------------------------------------------------------------------------------------


class BackboneCut:
    """Replaces the backbone's forward while entered: a call by a running step suspends it with a `BackboneCall`.

    Calls outside of steps go to the original forward. Hooks registered on the backbone run as usual, inside the step. A
    compiled ``training_step`` is split at the call. May be entered again and again, also after an exception.

    Args:
        modules: the backbone; or the layers that the step calls one after another, each with what the one before
            returned, or a part of it, and with anything else that does not come from a layer: e.g. those of an
            ``nn.ModuleList``. Then the step is suspended at the last of them. See `LayerWalk`.
        starts: the index in the backbone of each module's first layer; None: each is one layer.

    Attributes:
        in_place: computes the backbone where it is called, of its arguments, instead of suspending the step; for a
            backbone of one module (`is_one_module`). None: steps are suspended.
    """

    def __init__(self, *modules: nn.Module, starts: Sequence[int] | None = None) -> None:
        self._modules = modules
        self._starts = tuple(range(len(modules))) if starts is None else tuple(starts)
        self._originals: list[Callable[..., Any] | None] | None = None  # None: the class's
        # Made once: compiled code may be guarded by their identity, and would be compiled again for new ones.
        self._forwards = [self._forward_of(i) for i in range(len(modules))]
        self._split = False
        self._structures: dict[int, Any] = {}
        self._caches = SeenCaches()
        self.in_place: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None

    @property
    def is_one_module(self) -> bool:
        """Whether the backbone is called as a whole, and not layer by layer with the step's own code in between."""
        return len(self._modules) == 1

    def __enter__(self) -> BackboneCut:
        if not self._split and "torch._dynamo" in sys.modules:  # else nothing is compiled, and it is slow to import
            self._forwards = [torch.compiler.disable(forward) for forward in self._forwards]
            self._split = True
        self._originals = [module.__dict__.get("forward") for module in self._modules]
        for module, forward in zip(self._modules, self._forwards, strict=True):
            module.__dict__["forward"] = forward
        return self

    def __exit__(self, *_: object) -> None:
        assert self._originals is not None
        originals, self._originals, self.in_place = self._originals, None, None
        for module, original in zip(self._modules, originals, strict=True):
            if original is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = original

    def _forward_of(self, i: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.in_place is not None:
                return self._computed_in_place(args, kwargs)
            step = current_step()
            if step is None:
                return self._original(i, *args, **kwargs)
            if i == 0:
                self._caches.add([*args, *kwargs.values()])
            given = stand_ins(args, kwargs)
            chain = self._chain(i, given)
            chain.add(CalledLayer(i, args, kwargs, torch.is_grad_enabled(), saved_tensor_hooks()), given)
            if i + 1 < len(self._modules):
                return LayerOutput(chain, i)
            route, inputs = chain.route(self._starts)
            grad_enabled, without_hooks = chain.grad_enabled, chain.hooked_one_by_one
            chain.calls.clear()  # stand-ins lead here: what the layers were called with must not outlive the step
            call = BackboneCall(step.suspensions, route, inputs, grad_enabled=grad_enabled)
            del inputs, args, kwargs
            return step.suspend(call, without_hooks=without_hooks).take()

        return forward

    def _computed_in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.in_place is not None
        self._caches.add([*args, *kwargs.values()])
        return self.in_place(tuple(map(without_cache, args)), {k: without_cache(v) for k, v in kwargs.items()})

    def _chain(self, i: int, given: Sequence[LayerOutput]) -> LayerWalk:
        """Returns the walk that a call belongs to."""
        known = (out.chain for out in given if out.chain.modules is self._modules) if i else ()
        return next(iter(known), None) or LayerWalk(self._modules, self._original, self._structures)

    def _original(self, i: int, *args: Any, **kwargs: Any) -> Any:
        module = self._modules[i]
        replaced = self._originals[i] if self._originals is not None else None
        forward = replaced if replaced is not None else type(module).forward.__get__(module)
        return forward(*args, **kwargs)
