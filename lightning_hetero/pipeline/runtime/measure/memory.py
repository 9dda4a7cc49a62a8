"""What a layer keeps in memory: parameters, gradients, optimizer state, activations for the backward pass (layer T).

Activations are not derived from shapes but observed: torch's saved-tensor hooks report every tensor that autograd
keeps. They are counted by storage, because several operations keep the same tensor (a ReLU its output, the layer behind
it its input), and without the storages of parameters and buffers, which are there anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lightning_hetero.pipeline.runtime.ownership.pruning import moved_by

OptimizerSpec: TypeAlias = "Optimizer | Callable[[Sequence[nn.Parameter]], float] | None"


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
        optimizer: its settings per parameter count; parameters it does not have cost nothing. Or a callable that takes
            parameters and returns the size [bytes], or ``None`` for no state.

    Raises:
        ValueError: an optimizer that is not known; a callable is the way out.
    """
    parameters = list({id(p): p for p in parameters}.values())
    if optimizer is None or not parameters:
        return 0.0
    if not isinstance(optimizer, Optimizer):
        return float(optimizer(parameters))
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    copies = next((_COPIES[k.__name__] for k in type(optimizer).__mro__ if _is_known(k)), None)
    if copies is None:
        raise ValueError(
            f"how much state {type(optimizer).__name__} keeps is not known (known: {', '.join(_COPIES)}): give a"
            " callable that returns the bytes for some parameters"
        )
    return float(sum(copies(settings[id(p)]) * tensor_bytes([p]) for p in parameters if id(p) in settings))


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim") and kind.__name__ in _COPIES


# ---- what is on the device while a model is measured -------------------------------------------------------------
# Never more than has to be: of a step what is outside of the layers; each layer while it computes, alone. The model
# itself stays where it is, on the CPU: what goes to the device are copies, which are thrown away.


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor's values on the device: itself, if it is there. Everything measured goes through here."""
    return tensor.detach() if tensor.device == device else tensor.detach().to(device)


@contextmanager
def resident(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, parameters and buffers have their values on the device; what is elsewhere, in copies.

    Afterwards they are what they were: changes of copies are lost.
    """
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers()) if not t.is_meta and t.device != device}
    before = [(t, t.data) for t in tensors.values()]
    try:
        for tensor, values in before:
            tensor.data = copied_to(values, device)
        yield
    finally:
        for tensor, values in before:
            tensor.data = values


def move_but(module: nn.Module, left: Iterable[Tensor], device: torch.device) -> None:
    """Calls ``module.to(device)`` for all but some tensors, which stay where they are.

    There is no way back but a `Snapshot` from before.
    """
    stay = {id(tensor): tensor for tensor in left}

    def move(tensor: Tensor, _: object) -> Tensor:
        return tensor if id(tensor) in stay or tensor.is_meta else copied_to(tensor, device)

    with moved_by(module, move):
        module.to(device)
