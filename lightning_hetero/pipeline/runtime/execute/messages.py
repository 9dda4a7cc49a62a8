"""What travels between the stages of a pipeline, and as which bytes (layer T).

    header: its place in the step, binary; its form, pickled: what it is, and how its tensors lie in the payload
    payload: the tensors' bytes one after another, each beginning at a multiple of 64

A pipeline sends messages of few forms again and again: each is written and read once, and remembered.

Tensors are copied into the payload when a message is made: what the sender does with them afterwards, e.g. adding to a
gradient in place, does not change what is on its way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import What
from lightning_hetero.pipeline.runtime.step.layer_calls.route import PLAIN, Route, route_of
from lightning_hetero.transport.objects import from_bytes, to_bytes

_ALIGNMENT = 64
_FORMS = 256  # remembered, on either side
_NESTED = "nested"
_PLACE = struct.Struct("<7q")  # stage, micro-batch, micro-batches, step, samples, number and call of the pass
# Of a tensor: dtype, shape, order of its dimensions.
_Spec = tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None]
# What messages have in common that differ in place and values only: what, nest, tensors, requires_grad; of the pass
# grad_enabled, autocast, route.
_Form = tuple[str | None, Any, tuple[_Spec, ...], tuple[bool, ...], bool, tuple[tuple[str, torch.dtype], ...], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Under which circumstances a micro-batch goes through the layers; the same on all stages.

    Attributes:
        step: number of the training step; with the next two, of the random streams.
        number: of the micro-batch in the global batch.
        call: number of the backbone's call in its step.
        grad_enabled: False if the backbone was called under ``no_grad``: forward only.
        autocast: dtype by type of device for which autocast is enabled at the call.
        route: how the layers are called.
    """

    step: int
    number: int
    call: int = 0
    grad_enabled: bool = True
    autocast: Mapping[str, torch.dtype]
    route: Route = PLAIN


@dataclass(kw_only=True, slots=True)  # not frozen, which doubles what making one takes
class Message:
    """An activation or a gradient on its way.

    Attributes:
        what: which of them; None: the end of an evaluation step.
        stage: that uses it.
        micro_batch: from 0, in the group's order.
        micro_batches: their number; 0 in evaluation.
        step: in which it is sent.
        samples: in the micro-batch.
        value: a tensor or a (nested) tuple of tensors. Of a gradient: a flat tuple, one for each tensor of the
            activation, None without a gradient.
        requires_grad: of an activation, by tensor: whether a gradient is wanted back. None wanted: none is sent.
        way: of an activation, how it goes through the layers.
    """

    what: What | None
    stage: int = 0
    micro_batch: int = 0
    micro_batches: int = 0
    step: int = 0
    samples: int = 0
    value: Any = None
    requires_grad: tuple[bool, ...] = ()
    way: Pass | None = None

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


_NO_PASS = Pass(step=0, number=0, autocast={})


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
    what, way = message.what.value if message.what is not None else None, message.way or _NO_PASS
    form = what, nest, specs, message.requires_grad, way.grad_enabled, tuple(way.autocast.items()), way.route.text
    text, starts, size = _written(form)
    header = _PLACE.pack(*message.place[1:], way.number, way.call) + text
    device = tensors[0].device if tensors else "cpu"
    payload = torch.empty(front_bytes + size, dtype=torch.uint8, device=device)
    for (tensor, _), (dtype, shape, _), start in zip(dense, specs, starts, strict=True):
        _place(payload, front_bytes + start, dtype, shape).copy_(tensor)
    return header, payload


def unpack(header: bytes, payload: Tensor) -> Message:
    """Returns the message; its tensors are parts of ``payload``."""
    stage, micro_batch, micro_batches, step, samples, number, call = _PLACE.unpack_from(header)
    (what, nest, specs, requires_grad, grad_enabled, autocast, route), starts = _read(header[_PLACE.size :])
    tensors: list[Tensor] = []
    for (dtype, shape, order), start in zip(specs, starts, strict=True):
        tensor = _place(payload, start, dtype, shape)
        if order is not None:
            tensor = tensor.permute([order.index(i) for i in range(len(order))])
        tensors.append(tensor)
    way = Pass(
        step=step, number=number, call=call, grad_enabled=grad_enabled, autocast=dict(autocast), route=route_of(route)
    )
    return Message(
        what=What(what) if what is not None else None, stage=stage, micro_batch=micro_batch,
        micro_batches=micro_batches, step=step, samples=samples, value=_unnest(nest, tensors),
        requires_grad=requires_grad, way=way,
    )  # fmt: skip


@lru_cache(maxsize=_FORMS)
def _written(form: _Form) -> tuple[bytes, tuple[int, ...], int]:
    """Returns the form as bytes, where each tensor begins in the payload, and the payload's size [bytes]."""
    return to_bytes(form), *_layout(form[2])


@lru_cache(maxsize=_FORMS)
def _read(text: bytes) -> tuple[_Form, tuple[int, ...]]:
    """Returns the form, and where each tensor begins in the payload."""
    form: _Form = from_bytes(text)
    return form, _layout(form[2])[0]


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
    """Returns the tensor with its dimensions in the order of its memory, and that order; None: unchanged.

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
