"""What `torch.cuda` asks of its C++ part: devices, streams, events, memory, the runtime.

Python's part of `torch.cuda` is torch's own, and so are `torch.accelerator`, `torch.Stream` and `torch.Event`, which
stand on the device guard of `native/device.cpp`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.simgpu.sim.kernels import current, generators
from tests.simgpu.sim.native import lib
from tests.simgpu.sim.order import order

MEMORY_BYTES = 8 << 30
# Unequal ones, as the project's users have them.
_CARDS = (("SimForce 4090", (8, 9)), ("SimForce 2080", (7, 5)), ("SimForce 3080", (8, 6)), ("SimForce 3080", (8, 6)))
_CYCLES_PER_S = 1.5e9
_CUDA = int(torch._C._autograd.DeviceType.CUDA)  # pyright: ignore[reportAttributeAccessIssue]

_limits: dict[int, int] = {}


def cap(device: int, size: int) -> None:
    """Lets the device have ``size`` bytes, from now on; who asks for more gets `torch.OutOfMemoryError`."""
    _limits[device] = size
    lib().limit(device, size)


class _StreamBase(torch.Stream):
    """What `torch.cuda.Stream` stands on."""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, **_: Any):
        if device_type:
            made = {"stream_id": stream_id, "device_index": device_index, "device_type": device_type}
            return super().__new__(cls, **made)
        return super().__new__(cls, torch.device("cuda", torch.cuda.current_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class _EventBase(torch.Event):
    """What `torch.cuda.Event` stands on."""

    timed: bool

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any):
        made = super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)
        made.timed = enable_timing
        return made

    @property
    def cuda_event(self) -> int:
        return self.event_id

    def wait(self, stream: Any = None) -> None:
        self._must_be_recorded()
        super().wait(stream)

    def synchronize(self) -> None:
        self._must_be_recorded()
        super().synchronize()

    def elapsed_time(self, other: Any) -> float:
        # torch.Event's takes no subclass.
        if not (self.timed and other.timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and other.event_id):
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return order().elapsed_ms(self.event_id, other.event_id)

    def _must_be_recorded(self) -> None:
        """CUDA takes an event without a record for one that is reached: nobody wants to wait for that."""
        if not self.event_id:
            raise RuntimeError("an event that was never recorded is waited for")


class _Error(int):
    success = 0


def _runtime() -> SimpleNamespace:
    def info(device: int) -> tuple[int, int]:
        total = _limits.get(device, MEMORY_BYTES)
        return max(0, total - lib().in_use(device)), total

    return SimpleNamespace(
        cudaError=_Error,
        cudaGetErrorString=lambda code: f"CUDA error {int(code)}",
        cudaMemGetInfo=info,
        cudaHostRegister=lambda start, size, flags: lib().pin(start, size),
        cudaHostUnregister=lambda start: lib().unpin(start),
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


def _stats(device: int) -> dict[str, Any]:
    now, most = lib().in_use(device), lib().peak(device)
    row = {"current": now, "peak": most, "allocated": most, "freed": most - now}
    rows = {"all": row, "small_pool": row, "large_pool": dict.fromkeys(row, 0)}
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
    counts = {"num_ooms": lib().failures(device), "num_alloc_retries": 0, "max_split_size": -1}
    return {**{name: rows for name in names}, **counts}


def _exchange(device: int) -> int:
    return -1 if device < 0 else torch._C._accelerator_exchangeDevice(device)


def _maybe_exchange(device: int) -> int:  # another function: dynamo knows them by their identity
    return _exchange(device)


def _streamed(stream: torch.Stream) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, _CUDA


def _functions(gpus: int) -> dict[str, Callable[..., Any]]:
    """Returns what a torch with CUDA has in ``torch._C``."""
    return {
        "_cuda_init": lambda: lib().touched(),
        "_cuda_getDeviceCount": lambda: gpus,
        "_cuda_getDevice": torch._C._accelerator_getDeviceIndex,
        "_cuda_setDevice": torch._C._accelerator_setDeviceIndex,
        "_cuda_getArchFlags": lambda: "sm_75 sm_86 sm_89 sm_90",
        "_cuda_synchronize": lambda: torch._C._accelerator_synchronizeDevice(torch.cuda.current_device()),
        "_cuda_getCurrentStream": lambda device: _streamed(torch._C._accelerator_getStream(device)),
        "_cuda_getDefaultStream": lambda device: (0, device, _CUDA),
        "_cuda_setStream": lambda stream_id, device_index, device_type: torch._C._accelerator_setStream(
            torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        ),
        "_cuda_canDeviceAccessPeer": lambda one, other: True,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_sleep": lambda cycles: order().sleep(current(torch.cuda.current_device()), cycles / _CYCLES_PER_S),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memoryStats": _stats,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_resetPeakMemoryStats": lambda device: lib().forget_peak(device),
        "_cuda_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": lambda fraction, device: cap(device, int(fraction * MEMORY_BYTES)),
        "_cuda_getMemoryFraction": lambda device: _limits.get(device, MEMORY_BYTES) / MEMORY_BYTES,
    }


def _properties(device: int) -> SimpleNamespace:
    name, (major, minor) = _CARDS[device % len(_CARDS)]
    return SimpleNamespace(
        name=name, major=major, minor=minor, total_memory=MEMORY_BYTES, multi_processor_count=46,
        uuid=f"simulated-{device}", is_integrated=False, warp_size=32,
    )  # fmt: skip


def install(gpus: int) -> None:
    """Gives this process ``gpus`` devices."""
    import torch._dynamo  # looks at torch.cuda as it was when it is loaded

    lib().devices(gpus)
    for device in range(gpus):
        cap(device, MEMORY_BYTES)
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._has_cuda = True
    torch.version.cuda = "13.0"
    for name, function in _functions(gpus).items():
        setattr(torch._C, name, function)
    cuda: Any = torch.cuda
    _streams_on_ours(cuda)
    cuda._cudart = _runtime()
    cuda._is_in_bad_fork = lib().forked
    cuda._exchange_device, cuda._maybe_exchange_device = _exchange, _maybe_exchange
    cuda._get_device_properties = _properties
    generators[:] = [torch.Generator().manual_seed(0) for _ in range(gpus)]
    cuda.default_generators = tuple(generators)


def _streams_on_ours(cuda: Any) -> None:
    """Makes torch's classes for streams and events again, on our bases in place of torch's dummies."""
    for name, base in (("_CudaStreamBase", _StreamBase), ("_CudaEventBase", _EventBase)):
        setattr(torch._C, name, base)
    importlib.reload(cuda.streams)
    cuda.Stream, cuda.Event = cuda.streams.Stream, cuda.streams.Event
    cuda.ExternalStream = cuda.streams.ExternalStream
