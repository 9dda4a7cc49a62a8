"""What a layer keeps in memory: parameters, gradients, optimizer state, activations for the backward pass (layer T).

Activations are not derived from shapes but observed: torch's saved-tensor hooks report every tensor that autograd
keeps. They are counted by storage, because several operations keep the same tensor (a ReLU its output, the layer behind
it its input), and without the storages of parameters and buffers, which are there anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

__all__ = ["Kept", "OptimizerSpec", "optimizer_bytes", "state_bytes", "storage_of", "tensor_bytes", "trained_bytes"]

OptimizerSpec: TypeAlias = (
    "Optimizer | type[Optimizer] | Callable[[Sequence[nn.Parameter]], Optimizer | float] | None"
)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the size of the tensors' elements, each tensor once [bytes]."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def storage_of(tensor: Tensor) -> torch.UntypedStorage | Tensor:
    """Returns what holds the tensor's data: the same object for all its views, while that object is alive."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
        return tensor


class Kept(saved_tensors_hooks):
    """Collects the storages that autograd keeps for what is computed inside.

    What `torch.utils.checkpoint` leaves out does not appear; the inputs it keeps do.

    Args:
        ignored: tensors whose storages do not count: parameters and buffers.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        # Storages are held, not only their ids: the id of a freed one may be given to another.
        ignored_ones = {id(s): s for s in map(storage_of, ignored)}
        kept: dict[int, torch.UntypedStorage | Tensor] = {}

        def record(tensor: Tensor) -> Tensor:
            storage = storage_of(tensor)
            if id(storage) not in ignored_ones:
                kept[id(storage)] = storage
            return tensor.detach()  # the tensor itself, of an operation that saves its result, would keep its graph

        # No method of this object: it would refer to itself, and the storages would be held until the next collection.
        self._kept, self._record = kept, record
        super().__init__(record, lambda tensor: tensor)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Counts the tensors' storages as kept, too."""
        for tensor in tensors:
            self._record(tensor)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(storage_of(tensor)) in self._kept

    def size_bytes(self, besides: Iterable[Tensor] = ()) -> int:
        """Returns the size of all storages kept, without those of ``besides`` [bytes]."""
        known = {id(storage_of(t)) for t in besides}
        return sum(_size(s) for key, s in self._kept.items() if key not in known)


def _size(storage: torch.UntypedStorage | Tensor) -> int:
    return tensor_bytes([storage]) if isinstance(storage, Tensor) else storage.nbytes()


def trained_bytes(layer: nn.Module) -> int:
    """Returns the size of the layer's trainable parameters, each once: what is synchronised [bytes]."""
    return tensor_bytes(p for p in layer.parameters() if p.requires_grad)


def state_bytes(layer: nn.Module, optimizer: OptimizerSpec = None) -> float:
    """Returns the size of parameters, buffers, gradients and optimizer state [bytes].

    Raises:
        ValueError: see `optimizer_bytes`.
    """
    held = tensor_bytes([*layer.parameters(), *layer.buffers()])
    trained = [p for p in layer.parameters() if p.requires_grad]
    return held + tensor_bytes(trained) + optimizer_bytes(trained, optimizer)


# How many tensors of a parameter's size an optimizer keeps, by its settings for that parameter.
_COPIES: dict[str, Callable[[dict[str, Any]], int]] = {
    "SGD": lambda s: int(s.get("momentum", 0) != 0),
    "Adam": lambda s: 2 + bool(s.get("amsgrad")),
    "AdamW": lambda s: 2 + bool(s.get("amsgrad")),
    "NAdam": lambda s: 2,
    "RAdam": lambda s: 2,
    "Adamax": lambda s: 2,
    "Adagrad": lambda s: 1,
    "Adadelta": lambda s: 2,
    "ASGD": lambda s: 1,
    "Rprop": lambda s: 2,
    "RMSprop": lambda s: 1 + (s.get("momentum", 0) != 0) + bool(s.get("centered")),
}


def optimizer_bytes(parameters: Sequence[nn.Parameter], optimizer: OptimizerSpec) -> float:
    """Returns the size of the state an optimizer keeps for the parameters, without scalars such as step counts [bytes].

    Args:
        parameters: trained ones.
        optimizer: an instance (its settings per parameter count; parameters it does not have cost nothing), a class of
            `torch.optim` (its default settings), a callable that takes parameters and returns either the size [bytes]
            or an optimizer, which then takes one step on copies of the parameters on the CPU and is measured; or
            ``None`` for no state.

    Raises:
        ValueError: an optimizer that is not known; a callable that measures it is the way out.
    """
    parameters = list({id(p): p for p in parameters}.values())
    if optimizer is None or not parameters:
        return 0.0
    if isinstance(optimizer, Optimizer):
        settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        copies = _copies_of(type(optimizer))
        return float(sum(copies(settings[id(p)]) * tensor_bytes([p]) for p in parameters if id(p) in settings))
    if inspect.isclass(optimizer) and issubclass(optimizer, Optimizer):
        arguments = inspect.signature(optimizer.__init__).parameters
        defaults = {name: a.default for name, a in arguments.items() if a.default is not a.empty}
        return float(_copies_of(optimizer)(defaults) * tensor_bytes(parameters))
    if not callable(optimizer):
        raise ValueError(
            f"optimizer={optimizer!r} must be an optimizer, a class of torch.optim, or a callable that takes"
            " parameters and returns an optimizer or a number of bytes"
        )
    answer = optimizer(copied := [nn.Parameter(torch.zeros_like(p, device="cpu")) for p in parameters])
    return _step_and_measure(answer, copied) if isinstance(answer, Optimizer) else float(answer)


def _copies_of(kind: type[Optimizer]) -> Callable[[dict[str, Any]], int]:
    for base in kind.__mro__:
        if base.__module__.startswith("torch.optim") and base.__name__ in _COPIES:
            return _COPIES[base.__name__]
    raise ValueError(
        f"how much state {kind.__name__} keeps is not known (known: {', '.join(_COPIES)}): give a callable that makes"
        f" one, e.g. optimizer=lambda parameters: {kind.__name__}(parameters), and it is measured"
    )


def _step_and_measure(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> float:
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
    return float(tensor_bytes(kept))
