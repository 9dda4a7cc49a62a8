"""What travels between the stages of a pipeline, and as which bytes (layer T).

    header: its place in the step, binary; its form in JSON: what it is, and how its tensors lie in the payload
    payload: the tensors' bytes one after another, each beginning at a multiple of 64

A pipeline sends messages of few forms again and again: each is written and read once, and remembered.

Tensors are copied into the payload when a message is made: what the sender does with them afterwards, e.g. adding to a
gradient in place, does not change what is on its way.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import What

_ALIGNMENT = 64
_FORMS = 256  # remembered, on either side
_NESTED = "nested"
_PLACE = struct.Struct("<6q")  # stage, micro-batch, micro-batches, step, samples, call
# Of a tensor: dtype, shape, order of its dimensions.
_Spec = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]
# What messages have in common that differ in place and values only: what, nest, tensors, requires_grad, grad_enabled,
# autocast, route.
_Form = tuple[
    str | None, Any, tuple[_Spec, ...], tuple[bool, ...], bool, tuple[tuple[str, torch.dtype], ...], str
]


@dataclass(kw_only=True, slots=True)  # not frozen, which doubles what making one takes
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
        route: of an activation: how the layers are called, see `Route`.
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
    route: str = ""

    def __str__(self) -> str:
        if self.what is None:
            return f"the end of evaluation step {self.step}"
        of = f"micro-batch {self.micro_batch} of {self.micro_batches} ({self.samples} samples)"
        return f"the {self.what.name.lower()} for stage {self.stage} of {of} in step {self.step}"

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is a part of: sender and receiver must agree on it."""
        return self.what, self.stage, self.micro_batch, self.micro_batches, self.step, self.samples

    @property
    def kind(self) -> tuple[int, bool]:
        """What is computed with it is as with others of the same kind: its samples, and whether it is of training."""
        return self.samples, self.micro_batches > 0


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of a nested tuple, in order."""
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


# ---- to bytes --------------------------------------------------------------------------------------------------


def pack(message: Message, *, front_bytes: int = 0) -> tuple[bytes, Tensor]:
    """Returns the header, and the payload on the device of the first tensor.

    Args:
        message: to be sent.
        front_bytes: left free in front of the payload, a multiple of 64.

    Raises:
        TypeError: a value that cannot travel; names it.
    """
    tensors: list[Tensor] = []
    nest = _nest(message.value, tensors)
    dense = [_dense(tensor) for tensor in tensors]
    specs = tuple([(tensor.dtype, tuple(tensor.shape), order) for tensor, order in dense])
    what = message.what.value if message.what is not None else None
    autocast = tuple(message.autocast.items())
    text, starts, size = _written(
        (what, nest, specs, message.requires_grad, message.grad_enabled, autocast, message.route)
    )
    header = _PLACE.pack(*message.place[1:], message.call) + text
    device = tensors[0].device if tensors else "cpu"
    payload = torch.empty(front_bytes + size, dtype=torch.uint8, device=device)
    for (tensor, _), (dtype, shape, _), start in zip(dense, specs, starts, strict=True):
        _place(payload, front_bytes + start, dtype, shape).copy_(tensor)
    return header, payload


def unpack(header: bytes, payload: Tensor) -> Message:
    """Returns the message; its tensors are parts of ``payload``."""
    stage, micro_batch, micro_batches, step, samples, call = _PLACE.unpack_from(header)
    (what, nest, specs, requires_grad, grad_enabled, autocast, route), starts = _read(header[_PLACE.size :])
    tensors: list[Tensor] = []
    for (dtype, shape, order), start in zip(specs, starts, strict=True):
        tensor = _place(payload, start, dtype, shape)
        if order is not None:
            tensor = tensor.permute([order.index(i) for i in range(len(order))])
        tensors.append(tensor)
    return Message(
        what=What(what) if what is not None else None,
        stage=stage,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        step=step,
        value=_unnest(nest, tensors),
        requires_grad=requires_grad,
        grad_enabled=grad_enabled,
        autocast=dict(autocast),
        samples=samples,
        call=call,
        route=route,
    )


@lru_cache(maxsize=_FORMS)
def _written(form: _Form) -> tuple[bytes, tuple[int, ...], int]:
    """Returns the form in JSON, where each tensor begins in the payload, and the payload's size [bytes]."""
    what, nest, specs, requires_grad, grad_enabled, autocast, route = form
    starts, size = _layout(specs)
    fields = {
        "what": what,
        "nest": nest,
        "tensors": [[_name(dtype), shape, order] for dtype, shape, order in specs],
        "requires_grad": [int(flag) for flag in requires_grad],
        "grad_enabled": bool(grad_enabled),
        "autocast": {kind: _name(dtype) for kind, dtype in autocast},
        "route": route,
    }
    return json.dumps(fields, separators=(",", ":")).encode(), starts, size


@lru_cache(maxsize=_FORMS)
def _read(text: bytes) -> tuple[_Form, tuple[int, ...]]:
    """Returns the form, and where each tensor begins in the payload."""
    fields = json.loads(text)
    specs = [(getattr(torch, name), _tuples(shape), _tuples(order)) for name, shape, order in fields["tensors"]]
    form = (
        fields["what"],
        _tuples(fields["nest"]),
        tuple(specs),
        tuple(map(bool, fields["requires_grad"])),
        fields["grad_enabled"],
        tuple([(kind, getattr(torch, name)) for kind, name in fields["autocast"].items()]),
        fields["route"],
    )
    return form, _layout(specs)[0]


def _tuples(nest: Any) -> Any:
    return tuple([_tuples(item) for item in nest]) if isinstance(nest, list) else nest


def _nest(value: Any, tensors: list[Tensor]) -> Any:
    """Returns the structure: a tuple for a tuple, a number for a tensor, which is added to ``tensors``.

    A nested tensor, as `nn.TransformerEncoder` makes of padded batches in evaluation, is a tuple behind a word.
    """
    if value is None:
        return None
    if isinstance(value, Tensor) and value.is_nested:
        return (_NESTED, *_nest(value.unbind(), tensors))
    if type(value) is tuple:
        return tuple([_nest(item, tensors) for item in value])
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
    if isinstance(nest, tuple):
        if nest and nest[0] == _NESTED:
            return torch.nested.as_nested_tensor([_unnest(item, tensors) for item in nest[1:]])
        return tuple([_unnest(item, tensors) for item in nest])
    return tensors[nest]


def _dense(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None]:
    """Returns the tensor with its dimensions in the order of its memory, and that order; None: as they are.

    So that e.g. ``channels_last`` survives the journey.
    """
    if tensor.is_contiguous():
        return tensor, None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda i: -strides[i]))
    permuted = tensor.permute(order)
    return (permuted, order) if permuted.is_contiguous() else (tensor, None)


def _layout(tensors: Sequence[_Spec]) -> tuple[tuple[int, ...], int]:
    """Returns where each tensor begins, and the size of all [bytes]."""
    starts, at = [], 0
    for dtype, shape, _ in tensors:
        starts.append(at)
        at += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return tuple(starts), at


def _place(payload: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    part = payload if size == payload.numel() else payload[start : start + size]
    return part.view(dtype).view(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
