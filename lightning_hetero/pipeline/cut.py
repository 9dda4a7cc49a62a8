"""The cut: a training step is suspended where it calls the backbone, and its autograd graph is cut there (layer T).

    x = embed(batch)   |   h = x.detach()  ->  the pipeline's stages  ->  y   |   loss = head(y)
                       |   x.backward(h.grad)  <-  the stages  <-  y's grad   |   loss.backward()

Forward, as seen by who runs the steps; ``module.training_step`` is untouched:

    cut = BackboneCut(module.backbone)
    with cut:
        call = step.start().value                     # a BackboneCall
        y = ...                                       # call.message() through the stages
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # private by name, but where torch registers its own classes

from lightning_hetero.pipeline.ambient import enabled_autocast
from lightning_hetero.pipeline.arrival import Arrival
from lightning_hetero.pipeline.nests import split, split_call
from lightning_hetero.pipeline.resumable import current_step

__all__ = ["BackboneCall", "BackboneCut", "graphs_to_retain"]


# ---- one call --------------------------------------------------------------------------------------------------


class BackboneCall:
    """One call of the backbone by a training step: what goes out, what comes back, and the way back of gradients.

    Inputs and outputs may be any nest of tuples, lists, dicts and registered dataclasses with tensors and other values
    in it. What *travels* between processes is one tensor or a (nested) tuple of tensors; `message` refuses the rest.

    Attributes:
        number: of the call in its step, from 0.
        args, kwargs: as the step passed them, but with each tensor detached; it requires a gradient where the original
            did. They share memory with the originals.
        grad_enabled: False where the step called the backbone under ``no_grad``: forward only, nothing to send back.
        autocast: dtype by type of device for which autocast is enabled at the call; the layers belong under the same.
    """

    def __init__(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.number = number
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = enabled_autocast()
        sources, joined_call = split_call(args, kwargs)
        self._sources: list[Tensor] | None = sources
        self._inputs = [self._cut(source) for source in sources]
        self.args, self.kwargs = joined_call(self._inputs)
        self._arrival: Arrival | None = None
        self._reply: Any = None

    def _cut(self, source: Tensor) -> Tensor:
        return source.detach().requires_grad_(self.grad_enabled and source.requires_grad)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors in ``args`` and ``kwargs``, in order."""
        return list(self._inputs)

    def message(self) -> Any:
        """Returns the backbone's only argument: a tensor or a (nested) tuple of tensors.

        Raises:
            TypeError: the step passed something else, which cannot travel; names it.
        """
        if len(self.args) != 1 or self.kwargs:
            raise TypeError(
                f"the backbone was called with {len(self.args)} positional and the keyword arguments"
                f" {sorted(self.kwargs)}; between stages travels one argument, a tensor or a (nested) tuple of tensors:"
                " pack what the layers need into one tuple, or make what is constant part of the layers"
            )
        _require_travelling(self.args[0], "argument")
        return self.args[0]

    # ---- forward ---------------------------------------------------------------------------------------------------

    def reply(self, outputs: Any, requires_grad: bool | Sequence[bool] = True) -> Any:
        """Returns what the step is to be resumed with: ``outputs``, as the beginning of a new graph.

        Args:
            outputs: of the backbone; any nest as above.
            requires_grad: of each tensor of ``outputs`` in order, or of all; never more than grad mode at the call
                allows. False where neither an input nor a layer is trained.

        Raises:
            RuntimeError: a second reply.
            ValueError: another number of flags than of tensors.
        """
        if self._reply is not None:
            raise RuntimeError("this call has been replied to before")
        tensors, joined = split(outputs)
        flags = [requires_grad] * len(tensors) if isinstance(requires_grad, bool) else list(requires_grad)
        if len(flags) != len(tensors):
            raise ValueError(f"requires_grad has {len(flags)} flags for {len(tensors)} tensors: give one per tensor")
        if self.grad_enabled:
            self._arrival = Arrival(tensors, flags)
            tensors = self._arrival.take()
        else:
            tensors = [tensor.detach() for tensor in tensors]
        self._reply = _Reply(joined(tensors))
        return self._reply

    def _received(self, value: Any) -> Any:
        if value is not self._reply or value is None:
            raise TypeError(
                f"a step that called the backbone was resumed with a {type(value).__name__}:"
                " resume it with call.reply(outputs), or no gradient would come back"
            )
        outputs, value.outputs = value.outputs, None
        return outputs

    # ---- back ------------------------------------------------------------------------------------------------------

    def output_grads(self) -> list[Tensor | None]:
        """Returns the gradient of each tensor of the outputs, in order, after ``loss.backward()``; once.

        None where the loss does not depend on it.

        Raises:
            RuntimeError: the call was made under ``no_grad``, or has had no reply.
        """
        self._require_grad()
        assert self._arrival is not None
        return self._arrival.take_grads()

    def backward(self, input_grads: Sequence[Tensor | None], *, retain_graph: bool = False) -> None:
        """Lets gradients go on through what the step computed before this call.

        Args:
            input_grads: of each of `inputs`, in order; None where there is none. Ignored where an input requires none.
            retain_graph: see `graphs_to_retain`.

        Raises:
            RuntimeError: as `output_grads`; or a second call.
            ValueError: another number of gradients than of inputs.
        """
        self._require_grad()
        if self._sources is None:
            raise RuntimeError("this call's gradients have gone back before")
        if len(input_grads) != len(self._sources):
            raise ValueError(f"{len(input_grads)} gradients for {len(self._sources)} inputs: one each, or None")
        pairs = zip(self._sources, input_grads, strict=True)
        ways = [(source, grad) for source, grad in pairs if source.requires_grad and grad is not None]
        self._sources, self._inputs = None, []
        if ways:
            torch.autograd.backward([w[0] for w in ways], [w[1] for w in ways], retain_graph=retain_graph)

    def _require_grad(self) -> None:
        if not self.grad_enabled:
            raise RuntimeError("the backbone was called under no_grad: nothing goes back")
        if self._arrival is None:
            raise RuntimeError("nothing can go back through a call without a reply")

    def _roots(self) -> list[Any]:
        sources = self._sources or []
        return [source.grad_fn for source in sources if self.grad_enabled and source.grad_fn is not None]


class _Reply:
    """What `BackboneCall.reply` returns: told from raw outputs by its type."""

    __slots__ = ("outputs",)

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs


def _require_travelling(value: Any, where: str) -> None:
    if isinstance(value, Tensor):
        return
    if type(value) is not tuple:
        raise TypeError(
            f"the backbone's {where} is a {type(value).__name__}; between stages travels a tensor or a (nested) tuple"
            " of tensors: pass such, or make what is constant part of the layers"
        )
    for i, item in enumerate(value):
        _require_travelling(item, f"{where}[{i}]")


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
        if node in seen or hasattr(node, "variable") or isinstance(getattr(node, "arrival", None), Arrival):
            continue
        seen.add(node)
        stack += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return seen


# ---- the cut ---------------------------------------------------------------------------------------------------


class BackboneCut:
    """Replaces the backbone's forward while entered: a call by a running step suspends it with a `BackboneCall`.

    Calls outside of steps go to the original forward. Hooks registered on the backbone run as ever, inside the step. A
    compiled ``training_step`` is split at the call. May be entered again and again, also after an exception.

    Args:
        modules: the backbone; or the layers that the step calls one after another, each with nothing but what the one
            before returned, e.g. those of an ``nn.ModuleList``. Then the step is suspended at the last of them with
            what the first was called with, and what passes between them is good for nothing else.

    Raises:
        TypeError: no module, or something else than modules.
        ValueError: a module twice.
    """

    def __init__(self, *modules: nn.Module) -> None:
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise TypeError(f"modules={modules!r} must be one or more nn.Module")
        if len({id(module) for module in modules}) < len(modules):
            raise ValueError("a module is called at several places of the backbone: give it a module that calls it")
        self._modules = modules
        self._originals: list[Callable[..., Any] | None] | None = None  # None: the class's
        # Made once: compiled code may be guarded by their identity, and would be compiled again for new ones.
        self._forwards = [self._forward_of(i) for i in range(len(modules))]
        self._split = False

    def __enter__(self) -> BackboneCut:
        if self._originals is not None:
            raise RuntimeError("this cut is in force already")
        if not self._split and "torch._dynamo" in sys.modules:  # else nothing is compiled, and it is slow to import
            self._forwards = [torch.compiler.disable(forward) for forward in self._forwards]
            self._split = True
        self._originals = [module.__dict__.get("forward") for module in self._modules]
        for module, forward in zip(self._modules, self._forwards, strict=True):
            module.__dict__["forward"] = forward
        return self

    def __exit__(self, *_: object) -> None:
        assert self._originals is not None
        originals, self._originals = self._originals, None
        for module, original in zip(self._modules, originals, strict=True):
            if original is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = original

    def _forward_of(self, i: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            step = current_step()
            if step is None:
                return self._original(i)(*args, **kwargs)
            if i > 0:
                args, kwargs = self._called_with(i, args, kwargs)
            if i + 1 < len(self._modules):
                return _ComputedElsewhere(self, i, args, kwargs)
            call = BackboneCall(step.suspensions, args, kwargs)
            return call._received(step.suspend(call))

        return forward

    def _original(self, i: int) -> Callable[..., Any]:
        module = self._modules[i]
        replaced = self._originals[i] if self._originals is not None else None
        return replaced if replaced is not None else type(module).forward.__get__(module)

    def _called_with(self, i: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns what the first layer was called with, given what layer ``i`` is."""
        match args:
            case (_ComputedElsewhere() as before,) if before.cut is self and before.layer == i - 1 and not kwargs:
                return before.args, before.kwargs
        raise TypeError(
            f"layer {i} of the backbone was called with something else than the output of layer {i - 1}: a"
            " pipeline computes the layers one after another, without what stands between them; move it into a layer"
        )


class _ComputedElsewhere:
    """What a layer of a chain returns in a step, instead of its output, which is computed elsewhere."""

    def __init__(self, cut: BackboneCut, layer: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.cut, self.layer, self.args, self.kwargs = cut, layer, args, kwargs

    def _unknown(self) -> str:
        return (
            f"the output of layer {self.__dict__.get('layer')} of the backbone is only known to the stage of a"
            " pipeline that computes it: pass it to the next layer and to nothing else, or move what uses it there"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no {name!r}: {self._unknown()}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        between = next(value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, cls))
        raise RuntimeError(between._unknown())  # not TypeError: operators would take it for NotImplemented
