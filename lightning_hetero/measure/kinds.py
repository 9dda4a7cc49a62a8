"""The kinds of devices: what the host, accelerators and CUDA's GPUs can do (layer T).

The host's methods do next to nothing, because its work is done when a call returns. Those of an `Accelerator` stand on
the module that torch has for its type (`torch.cuda`, `torch.xpu`, that of a device which is registered as a
``PrivateUse1`` backend), which follow `torch.cuda`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor


class Stamp:
    """A place in the order of a device's work: on the host a time, on an accelerator an event on the current stream.

    Args:
        at_s: the host's time [s].
    """

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def reached(self) -> bool:
        """Whether all work before it is done; never waits."""
        return True

    def wait(self) -> None:
        """Has the host wait until all work before it is done."""

    def hold(self) -> None:
        """Has the current stream wait for it, and not the host."""

    def seconds_until(self, later: Any) -> float:
        """Returns the time between two stamps, both reached, that were made with ``timing`` [s]."""
        return later._at_s - self._at_s


class _EventStamp(Stamp):
    def __init__(self, event: Any, stream: Callable[[], Any]) -> None:
        self._event, self._stream = event, stream

    def reached(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        if not self._event.query():  # else the host need not stop
            self._event.synchronize()

    def hold(self) -> None:
        self._event.wait(self._stream())

    def seconds_until(self, later: Any) -> float:
        return self._event.elapsed_time(later._event) / 1e3


def _nothing() -> None: ...


class HostDevice:
    """The host, and whatever else has done its work when a call returns.

    Args:
        device: as torch names it.

    Attributes:
        device: as given.
        asynchronous: calls return before their work is done, so that the host's clock does not time it.
        records_graphs: compiled code may be recorded as a graph of kernels, for the shapes that it was recorded with.
    """

    asynchronous = False
    records_graphs = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # ---- order and time ---------------------------------------------------------------------------------------

    def stamp(self, *, timing: bool = False) -> Stamp:
        """Returns a stamp after the work submitted so far.

        Args:
            timing: its time will be asked for.
        """
        return Stamp(time.perf_counter())

    def synchronize(self) -> None:
        """Waits until all work submitted to the device is done."""

    def side_stream(self) -> Any:
        """Returns a new stream next to the current one; None: the device has no streams."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Submits what runs inside to ``stream``, one of `side_stream`; the caller orders the two with stamps."""
        return nullcontext()

    def keep_for_stream(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` is not used for anything else before the current stream has come to here."""

    def current(self) -> AbstractContextManager[Any]:
        """Makes this the current device of its kind inside."""
        return nullcontext()

    def make_current(self) -> None:
        """Makes this the current device of its kind in this thread."""

    def here(self) -> Callable[[], None]:
        """Returns what makes the current device and stream of this thread those that they are now."""
        return _nothing

    # ---- memory -----------------------------------------------------------------------------------------------

    def total_bytes(self) -> float:
        """Returns the memory of the device; ``inf``: nothing tells."""
        return math.inf

    def free_bytes(self) -> float:
        """Returns what this process may still use, with what its allocator holds unused; ``inf``: nothing tells."""
        return math.inf

    def used_bytes(self) -> float:
        """Returns what this process's tensors use; 0: nothing tells."""
        return 0.0

    def peak_bytes(self) -> float:
        """Returns the most that `used_bytes` was since `forget_peak`; 0: nothing tells."""
        return 0.0

    def forget_peak(self) -> None:
        """Resets the count of the peak; other readers of it, e.g. `DeviceStatsMonitor`, lose what was before."""

    def empty_cache(self) -> None:
        """Gives memory that the allocator holds unused back to the device."""

    def host_bytes(self, size: int) -> Tensor:
        """Returns memory of the host, uint8, from and to which the device copies while the host goes on."""
        return torch.empty(size, dtype=torch.uint8)

    # ---- random numbers ---------------------------------------------------------------------------------------

    def random_state(self) -> Tensor | None:
        """Returns the state of the device's generator; None: the host's is all there is."""
        return None

    def set_random_state(self, state: Tensor | None) -> None:
        """Puts back what `random_state` returned."""

    def seed(self, seed: int) -> None:
        """Seeds the device's generator."""

    # ---- what it is -------------------------------------------------------------------------------------------

    def name(self) -> str:
        """Returns the name of the product; for the host, the device's type."""
        return self.device.type

    def identity(self) -> str:
        """Returns what no other device of any machine is called; empty: nothing tells."""
        return ""

    def capability(self) -> tuple[int, int] | None:
        """Returns what CUDA says a card of NVIDIA's can do, e.g. (8, 6); None: it is none."""
        return None

    def tensor_cores(self) -> bool:
        """Whether matrix products of half precision are faster in tiles of eight."""
        return False

    def tunes_each_shape(self) -> bool:
        """Whether each shape that is new is tried with many kernels first, which takes long."""
        return False

    def computes_bfloat16(self) -> bool:
        """Whether bfloat16 is computed, and not emulated many times slower."""
        return True

    def page_lock(self, address: int, size: int) -> Callable[[], None] | None:
        """Locks the host's memory for fast copies; returns what ends that, None where it is not to be had."""
        return None


class Accelerator(HostDevice):
    """A device whose module in torch is made after `torch.cuda`."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch: Any = torch.get_device_module(device)

    def _stream(self) -> Any:
        return self._torch.current_stream(self.device)

    def stamp(self, *, timing: bool = False) -> Stamp:
        event = self._event(timing)
        event.record(self._stream())
        return _EventStamp(event, self._stream)

    def _event(self, timing: bool) -> Any:
        return self._torch.Event(enable_timing=timing)

    def synchronize(self) -> None:
        self._torch.synchronize(self.device)

    def side_stream(self) -> Any:
        return self._torch.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._torch.stream(stream)

    def keep_for_stream(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream())

    def current(self) -> AbstractContextManager[Any]:
        return self._torch.device(self.device)

    def make_current(self) -> None:
        self._torch.set_device(self.device)

    def here(self) -> Callable[[], None]:
        own = self._torch
        stream, index = own.current_stream(), own.current_device()

        def put() -> None:
            if own.current_stream() != stream:
                own.set_stream(stream)  # and its device
            if own.current_device() != index:
                own.set_device(index)

        return put

    def total_bytes(self) -> float:
        return float(self._torch.get_device_properties(self.device).total_memory)

    def free_bytes(self) -> float:
        free, _ = self._torch.mem_get_info(self.device)
        held = self._torch.memory_reserved(self.device) - self._torch.memory_allocated(self.device)
        return float(free + held)

    def used_bytes(self) -> float:
        return float(self._torch.memory_allocated(self.device))

    def peak_bytes(self) -> float:
        return float(self._torch.max_memory_allocated(self.device))

    def forget_peak(self) -> None:
        self._torch.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        self._torch.empty_cache()

    def host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def random_state(self) -> Tensor | None:
        return self._torch.get_rng_state(self.device)

    def set_random_state(self, state: Tensor | None) -> None:
        if state is not None:
            self._torch.set_rng_state(state, self.device)

    def seed(self, seed: int) -> None:
        with self.current():
            self._torch.manual_seed(seed)

    def name(self) -> str:
        return self._torch.get_device_name(self.device)

    def identity(self) -> str:
        return str(getattr(self._torch.get_device_properties(self.device), "uuid", ""))

    def computes_bfloat16(self) -> bool:
        with self.current():
            return self._torch.is_bf16_supported()


class Cuda(Accelerator):
    """A GPU of NVIDIA's, or of AMD's where torch is built for ROCm."""

    records_graphs = True

    def _event(self, timing: bool) -> Any:
        return self._torch.Event(enable_timing=timing, blocking=True)  # else a wait keeps a processor busy

    def capability(self) -> tuple[int, int] | None:
        return None if torch.version.hip else self._torch.get_device_capability(self.device)

    def tensor_cores(self) -> bool:
        return (self.capability() or (7, 0)) >= (7, 0)

    def tunes_each_shape(self) -> bool:
        return torch.backends.cudnn.benchmark

    def computes_bfloat16(self) -> bool:
        return (self.capability() or (8, 0)) >= (8, 0)  # not is_bf16_supported(), which counts emulation

    def page_lock(self, address: int, size: int) -> Callable[[], None] | None:
        runtime = self._torch.cudart()
        if int(runtime.cudaHostRegister(address, size, 0)) != 0:
            with suppress(RuntimeError):  # CUDA keeps the error and blames the next kernel: this one
                torch.zeros(1, device=self.device)
            return None

        def unlock() -> None:
            runtime.cudaHostUnregister(address)

        return unlock
