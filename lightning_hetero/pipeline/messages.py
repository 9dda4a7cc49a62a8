"""What travels between the stages of a pipeline, and as which bytes (layer T).

    header: JSON, what it is and how its tensors lie in the payload
    payload: the tensors' bytes one after another, each beginning at a multiple of 64

Tensors are copied into the payload when a message is made: what the sender does with them afterwards, e.g. adding to a
gradient in place, does not change what is on its way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.pipeline.schedule import What

__all__ = ["Message", "pack", "tensors_in", "unpack"]

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """An activation or a gradient on its way.

    Attributes:
        what: which of them; None: the end of an evaluation step.
        stage: that uses it.
        micro_batch: from 0, in the group's order.
        micro_batches: their number; 0 in evaluation.
        step: in which it is sent.
        value: a tensor or a (nested) tuple of tensors. Of a gradient: a flat tuple, one for each tensor of the
            activation, None where there is none.
        requires_grad: of an activation, by tensor: whether a gradient is wanted back. None wanted: none is sent.
        grad_enabled: of an activation: False if the backbone was called under ``no_grad``.
        autocast: of an activation: dtype of autocast at the backbone's call, by type of device.
        samples: in the micro-batch.
        call: of an activation: number of the backbone's call in its step.
    """

    what: What | None
    stage: int = 0
    micro_batch: int = 0
    micro_batches: int = 0
    step: int = 0
    value: Any = None
    requires_grad: tuple[bool, ...] = ()
    grad_enabled: bool = False
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    samples: int = 0
    call: int = 0

    def __str__(self) -> str:
        if self.what is None:
            return f"the end of evaluation step {self.step}"
        of = f"micro-batch {self.micro_batch} of {self.micro_batches} ({self.samples} samples)"
        return f"the {self.what.name.lower()} for stage {self.stage} of {of} in step {self.step}"

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is a part of: sender and receiver must agree on it."""
        return self.what, self.stage, self.micro_batch, self.micro_batches, self.step, self.samples


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of a nested tuple, in order."""
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


# ---- to bytes --------------------------------------------------------------------------------------------------


def pack(message: Message) -> tuple[bytes, Tensor]:
    """Returns the header, and the payload on the device of the first tensor.

    Raises:
        TypeError: a value that cannot travel; names it.
    """
    tensors: list[Tensor] = []
    nest = _nest(message.value, tensors)
    dense = [_dense(tensor) for tensor in tensors]
    starts, size = _layout([(tensor.numel(), tensor.element_size()) for tensor, _ in dense])
    payload = torch.empty(size, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")
    for (tensor, _), start in zip(dense, starts, strict=True):
        _place(payload, start, tensor.dtype, tensor.shape).copy_(tensor)
    header = {
        "what": message.what.value if message.what is not None else None,
        "place": message.place[1:],
        "call": message.call,
        "nest": nest,
        "tensors": [[_name(t.dtype), list(t.shape), order] for t, order in dense],
        "requires_grad": [int(flag) for flag in message.requires_grad],
        "grad_enabled": message.grad_enabled,
        "autocast": {kind: _name(dtype) for kind, dtype in message.autocast.items()},
    }
    return json.dumps(header, separators=(",", ":")).encode(), payload


def unpack(header: bytes, payload: Tensor) -> Message:
    """Returns the message; its tensors are parts of ``payload``."""
    fields = json.loads(header)
    specs = [(getattr(torch, name), shape, order) for name, shape, order in fields["tensors"]]
    starts, _ = _layout([(math.prod(shape), dtype.itemsize) for dtype, shape, _ in specs])
    tensors: list[Tensor] = []
    for (dtype, shape, order), start in zip(specs, starts, strict=True):
        tensor = _place(payload, start, dtype, shape)
        if order is not None:
            tensor = tensor.permute([order.index(i) for i in range(len(order))])
        tensors.append(tensor)
    stage, micro_batch, micro_batches, step, samples = fields["place"]
    return Message(
        what=What(fields["what"]) if fields["what"] is not None else None,
        stage=stage,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        step=step,
        value=_unnest(fields["nest"], tensors),
        requires_grad=tuple(map(bool, fields["requires_grad"])),
        grad_enabled=fields["grad_enabled"],
        autocast={kind: getattr(torch, name) for kind, name in fields["autocast"].items()},
        samples=samples,
        call=fields["call"],
    )


def _nest(value: Any, tensors: list[Tensor]) -> Any:
    """Returns the structure: a list for a tuple, a number for a tensor, which is added to ``tensors``."""
    if value is None:
        return None
    if type(value) is tuple:
        return [_nest(item, tensors) for item in value]
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        what = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(
            f"a layer of the backbone returned {what} at the border of two stages; between stages travels a dense"
            " tensor or a (nested) tuple of such: change what the layer returns"
        )
    tensors.append(value.detach())
    return len(tensors) - 1


def _unnest(nest: Any, tensors: Sequence[Tensor]) -> Any:
    if nest is None:
        return None
    if isinstance(nest, list):
        return tuple([_unnest(item, tensors) for item in nest])
    return tensors[nest]


def _dense(tensor: Tensor) -> tuple[Tensor, list[int] | None]:
    """Returns the tensor with its dimensions in the order of its memory, and that order; None: as they are.

    So that e.g. ``channels_last`` survives the journey.
    """
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda i: -strides[i])
    permuted = tensor.permute(order)
    return (permuted, order) if permuted.is_contiguous() else (tensor, None)


def _layout(sizes: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Returns where each tensor begins, and the size of all [bytes], given elements and bytes per element."""
    starts, at = [], 0
    for numel, itemsize in sizes:
        starts.append(at)
        at += -(-numel * itemsize // _ALIGNMENT) * _ALIGNMENT
    return starts, at


def _place(payload: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return payload[start : start + size].view(dtype).view(tuple(shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
