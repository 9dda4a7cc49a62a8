"""What of a model is on the device while it is measured: never more than has to be (layer T).

    the step        what is outside of the layers; each layer while it computes, alone
    a layer         the same, and that layer

The model itself stays where it is, on the CPU: what goes to the device are copies, which are thrown away.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["copied_to", "move_but", "resident"]


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

    Modules that do more there do it, such as a LightningModule's ``device`` or the states of metrics. There is no way
    back but a `Snapshot` from before.
    """
    stay = {id(tensor): tensor for tensor in left}

    def apply(module: nn.Module, move: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        del move

        def moved(tensor: Tensor) -> Tensor:
            return tensor if id(tensor) in stay or tensor.is_meta else copied_to(tensor, device)

        return type(module)._apply(module, moved, *args, **kwargs)

    vars(module)["_apply"] = types.MethodType(apply, module)
    try:
        module.to(device)
    finally:
        del vars(module)["_apply"]


