"""What a layer keeps in memory: parameters, gradients, optimizer state, activations for the backward pass (layer T).

Activations are not derived from shapes but observed: torch's saved-tensor hooks report every tensor that autograd
keeps. They are counted by storage, because several operations keep the same tensor (a ReLU its output, the layer behind
it its input), and without the storages of parameters and buffers, which are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from lightning_hetero.pipeline.runtime.ownership.by_parameter import copies_per_group
from lightning_hetero.pipeline.runtime.ownership.pruning import moved_by


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


def state_bytes(layer: nn.Module, copies: Mapping[int, int]) -> int:
    """Returns the size of parameters, buffers, gradients and optimizer state, see `state_copies` [bytes]."""
    held = tensor_bytes([*layer.parameters(), *layer.buffers()])
    trained = [p for p in layer.parameters() if p.requires_grad]
    return held + tensor_bytes(trained) + optimizer_bytes(trained, copies)


def state_copies(optimizer: Optimizer | None) -> dict[int, int]:
    """Returns how many tensors of its size an optimizer keeps for a parameter, by the parameter's id."""
    if optimizer is None:
        return {}
    groups = zip(optimizer.param_groups, copies_per_group(optimizer), strict=True)
    return {id(p): number for group, number in groups for p in group["params"]}


def optimizer_bytes(parameters: Iterable[nn.Parameter], copies: Mapping[int, int]) -> int:
    """Returns the size of the state an optimizer keeps for the parameters, without scalars such as step counts [bytes].

    Args:
        parameters: trained ones; those that the optimizer does not have cost nothing.
        copies: see `state_copies`.
    """
    return sum(copies.get(key, 0) * p.nbytes for key, p in {id(p): p for p in parameters}.items())


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
