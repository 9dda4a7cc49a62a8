"""Kernels of simulated devices: the host's, on aliases of the same memory; and copies, which are late.

All of torch's operations on tensors of the device that C++ (`native/tensors.cpp`) does not do come to `_kernel`, in
whatever thread they are called, the autograd engine's and the DDP reducer's included.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd  # pyright: ignore[reportAttributeAccessIssue]

from tests.simgpu.sim import fused
from tests.simgpu.sim.native import lib
from tests.simgpu.sim.order import Stream, order
from tests.simgpu.sim.races import keep, uses
from tests.simgpu.sim.syncs import syncs

# Operations whose result the host must have before it goes on.
_TO_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique", "_unique2"}
_TO_HOST |= {"unique_dim", "unique_consecutive", "unique_dim_consecutive"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# What the schema of batch norm does not say: in training it writes these.
_STATISTICS = ("running_mean", "running_var")

generators: list[torch.Generator] = []  # one per device, on the host: kernels draw from the device's
_drawing = threading.Lock()


def is_far(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cuda"


def current(device: int) -> Stream:
    """Returns the stream of this thread."""
    return device, torch._C._accelerator_getStream(device).stream_id


class _Argument(NamedTuple):
    writes: bool  # the operation writes it
    tensor: bool  # it is a tensor


@lru_cache(maxsize=4096)
def _arguments(op: Any) -> tuple[list[_Argument], dict[str, _Argument]]:
    """Returns what the schema says, by position and by name."""
    statistics = "batch_norm" in op._schema.name and "backward" not in op._schema.name
    found = [
        _Argument(
            (argument.alias_info is not None and argument.alias_info.is_write)
            or (statistics and argument.name in _STATISTICS),
            str(argument.type) == "Tensor",
        )
        for argument in op._schema.arguments
    ]
    names = [argument.name for argument in op._schema.arguments]
    return found, dict(zip(names, found, strict=True))


class Operands:
    """Operands of one call, and what stands for them on the host."""

    def __init__(self, op: Any) -> None:
        self.name = op._schema.name.partition("::")[2]
        self._positions, self._names = _arguments(op)
        self.far: list[Tensor] = []
        self.near: list[Tensor] = []
        self.used: list[tuple[Tensor, bool]] = []
        self.device: int | None = None
        self._wrong: Tensor | None = None  # of the host, beside the device's

    def positional(self, i: int, x: Any) -> Any:
        return self._argument(x, self._positions[i])

    def named(self, name: str, x: Any) -> Any:
        return self._argument(x, self._names[name])

    def _argument(self, x: Any, argument: _Argument) -> Any:
        if argument.tensor and isinstance(x, (bool, int, float, complex)):
            # A number in place of a tensor has come here as a number; it keeps its digits.
            return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None)
        return self._of(x, argument.writes)

    def _of(self, x: Any, writes: bool) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x, writes)
        if isinstance(x, (list, tuple)):
            return type(x)(self._of(part, writes) for part in x)
        if isinstance(x, torch.device) and x.type == "cuda":
            self.device = torch.cuda.current_device() if x.index is None else x.index
            return torch.device("cpu")
        return x

    def _tensor(self, x: Tensor, writes: bool) -> Tensor:
        if not is_far(x):
            if x.dim() and x.device.type != "meta":
                self._wrong = x
            return x
        if self.device is None:
            self.device = x.device.index
        elif self.device != x.device.index and x.dim():
            raise _mixed(f"cuda:{self.device}", x.device, self.name)
        near = torch.ops.simgpu.near(x)
        self.far.append(x)
        self.near.append(near)
        self.used.append((x, writes))
        return near

    def check(self) -> None:
        """Refuses operands of the host beside the device's, but numbers and indices, for which the host waits."""
        if self._wrong is not None and self.far:
            if self.name not in _INDEXED:
                raise _mixed(self.far[0].device, self._wrong.device, self.name)
            syncs.note("index by a tensor of the host")

    def result(self, x: Any) -> Any:
        """Returns what the caller gets for a result of the host's kernel."""
        if isinstance(x, (list, tuple)):
            return type(x)(self.result(part) for part in x) if type(x) in (list, tuple) else tuple(map(self.result, x))
        if not isinstance(x, Tensor) or self.device is None:
            return x
        for far, near in zip(self.far, self.near, strict=True):
            if x is near:
                return far
        return torch.ops.simgpu.far(x, self.near, self.far, self.device)

    def follow(self) -> None:
        """Gives operands that the kernel has resized their new size."""
        for (far, writes), near in zip(self.used, self.near, strict=True):
            if writes and (far.shape != near.shape or far.stride() != near.stride()):
                torch.ops.simgpu.follow(far, near)


def _mixed(one: Any, other: Any, name: str) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! (when calling {name})"
    )


@torch._disable_dynamo
def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _AutoDispatchBelowAutograd():
        operands = Operands(op)
        near_args = [operands.positional(i, x) for i, x in enumerate(args)]
        near_kwargs = {name: operands.named(name, x) for name, x in kwargs.items()}
        operands.check()
        device = operands.device
        if device is None:
            return op(*near_args, **near_kwargs)
        stream = current(device)
        uses(operands.used, stream, operands.name)
        if _host_waits(operands.name, args):
            syncs.note(operands.name)
            order().host_waits(stream)
        if torch.Tag.nondeterministic_seeded in op.tags:
            out = _drawn(op, device, near_args, near_kwargs)
        else:
            out = op(*near_args, **near_kwargs)
        operands.follow()
        return operands.result(out)


def _host_waits(name: str, args: tuple[Any, ...]) -> bool:
    if name in _INDEXED:  # masks are counted first
        return any(is_far(x) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return name in _TO_HOST or (name == "repeat_interleave" and len(args) < 2)


def _drawn(op: Any, device: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Has the host's kernel draw from the device's generator, unless it was given one."""
    if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
        return op(*args, **kwargs)
    with _drawing:
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(generators[device].get_state())
        try:
            return op(*args, **kwargs)
        finally:
            generators[device].set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(host)


# ---- copies


@torch._disable_dynamo
def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with _AutoDispatchBelowAutograd():
        if is_far(to) and is_far(source):
            _device_to_device(to, source)
        elif is_far(to):
            _host_to_device(to, source, non_blocking)
        else:
            _device_to_host(to, source, non_blocking)
        return to


def _device_to_device(to: Tensor, source: Tensor) -> None:
    there, here = to.device.index, source.device.index
    if there == here:
        uses([(source, False), (to, True)], current(here), "copy_")
    else:  # on the source's stream; both devices' streams wait for one another
        orders, one, other = order(), current(here), current(there)
        orders.waits(one, orders.now(other))
        uses([(source, False), (to, True)], one, "copy_ between devices")
        orders.waits(other, orders.now(one))
    torch.ops.simgpu.near(to).copy_(torch.ops.simgpu.near(source))


def _host_to_device(to: Tensor, source: Tensor, non_blocking: bool) -> None:
    stream = current(to.device.index)
    number = uses([(to, True)], stream, "copy_ to the device")
    torch.ops.simgpu.near(to).copy_(source)
    if not non_blocking:  # torch waits for the stream
        syncs.note("copy to the device, blocking")
        order().host_waits(stream)
    elif not lib().is_pinned(source.data_ptr()):  # the host may wait, says NVIDIA: it goes on, but when is not known
        syncs.note("copy to the device, pageable")
    elif order().asynchronous:
        order().later(stream, number, _Unchanged(source))


def _device_to_host(to: Tensor, source: Tensor, non_blocking: bool) -> None:
    stream = current(source.device.index)
    number = uses([(source, False)], stream, "copy_ to the host")
    near = torch.ops.simgpu.near(source)
    if non_blocking and lib().is_pinned(to.data_ptr()):
        if order().asynchronous:
            order().later(stream, number, _Arrival(to, near.to(to.dtype, copy=True)))
            return
    else:
        syncs.note("copy to the host, " + ("pageable" if non_blocking else "blocking"))
        order().host_waits(stream)
    to.copy_(near)


class _Arrival:
    """Values on their way to the host: until they are there, what is there is no number."""

    def __init__(self, to: Tensor, values: Tensor) -> None:
        self.to, self.values = to, values
        to.fill_(float("nan") if to.is_floating_point() or to.is_complex() else 77)

    def __call__(self) -> None:
        with torch.no_grad(), _AutoDispatchBelowAutograd():
            self.to.copy_(self.values)


class _Unchanged:
    """The source of a copy to the device, in locked memory, must stay as it is until the copy is done."""

    def __init__(self, source: Tensor) -> None:
        from tests.simgpu.sim.syncs import place

        self.source, self.values, self.place = source.detach(), source.detach().clone(), place()

    def __call__(self) -> None:
        with torch.no_grad(), _AutoDispatchBelowAutograd():
            same = torch.equal(_bits(self.source), _bits(self.values))
        if not same:
            order().race(f"the host has changed locked memory that is still being copied to the device at {self.place}")


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@torch._disable_dynamo
def _record_stream(tensor: Tensor, stream: Any) -> None:
    at = torch.ops.simgpu.where(tensor)
    if at:
        keep(at[0], stream.device_index, stream.stream_id)


def _registered() -> Iterator[torch.library.Library]:
    every = torch.library.Library("_", "IMPL")
    every.fallback(_kernel, "CUDA")
    yield every
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("copy_", _copy, "CUDA")
    aten.impl("record_stream", _record_stream, "CUDA")
    for op in (torch.ops.aten.convolution_backward.default,):  # would look for a kernel of CUDA without asking anybody
        aten.impl(op, partial(_kernel, op), "CUDA")
    for name, function in fused.FUNCTIONS.items():
        aten.impl(name, function, "CUDA")
    yield aten


_libraries: list[torch.library.Library] = []


def install() -> None:
    """Has torch call the functions of this file; they stay until the process ends."""
    _libraries.extend(_registered())
