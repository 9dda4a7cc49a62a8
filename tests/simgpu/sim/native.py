"""The C++ part as Python sees it: loaded before torch is imported, because torch looks for its hooks once."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from tests.simgpu.sim.build import NotBuilt, library, torch_folder

_INT, _ID, _PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_CALLS = {  # as in struct Python of native/memory.h
    "record": ctypes.CFUNCTYPE(_INT, _ID, _INT, _ID),
    "block": ctypes.CFUNCTYPE(_INT, _ID, _INT, _ID),
    "event_done": ctypes.CFUNCTYPE(_INT, _ID),
    "stream_done": ctypes.CFUNCTYPE(_INT, _INT, _ID),
    "wait_event": ctypes.CFUNCTYPE(_INT, _ID),
    "wait_stream": ctypes.CFUNCTYPE(_INT, _INT, _ID),
    "wait_device": ctypes.CFUNCTYPE(_INT, _INT),
    "elapsed_ms": ctypes.CFUNCTYPE(ctypes.c_double, _ID, _ID),
    "keep": ctypes.CFUNCTYPE(_INT, _ID, _INT, _ID),
}
ERROR = 2  # of event_done and stream_done, whose 1 means yes


class _Table(ctypes.Structure):
    _fields_ = [(name, kind) for name, kind in _CALLS.items()]


class Library:
    """Functions of the library; called with Python's lock held, as none of them waits."""

    def __init__(self) -> None:
        self._lib = ctypes.PyDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
        for name in ("in_use", "peak", "failures"):
            getattr(self._lib, f"simgpu_{name}").restype = _ID
        self._kept: Any = None
        self._ids = (_ID * 1024)()

    def call_python(self, functions: dict[str, Callable[..., Any]]) -> None:
        """Has streams and events of torch call these; see `answer`."""
        self._kept = _Table(**{name: _CALLS[name](function) for name, function in functions.items()})
        self._lib.simgpu_python(ctypes.byref(self._kept))

    def error(self, text: str) -> None:
        self._lib.simgpu_error(text.encode())

    def devices(self, count: int) -> None:
        self._lib.simgpu_devices(count)

    def forked(self) -> bool:
        return bool(self._lib.simgpu_forked())

    def touched(self) -> None:
        self._lib.simgpu_touched()

    def limit(self, device: int, size: int) -> None:
        self._lib.simgpu_limit(device, _ID(size))

    def in_use(self, device: int) -> int:
        return self._lib.simgpu_in_use(device)

    def peak(self, device: int) -> int:
        return self._lib.simgpu_peak(device)

    def failures(self, device: int) -> int:
        """Returns how often memory was short."""
        return self._lib.simgpu_failures(device)

    def forget_peak(self, device: int) -> None:
        self._lib.simgpu_forget_peak(device)

    def freed(self) -> list[int]:
        """Returns the blocks that were given back since the last call."""
        n = self._lib.simgpu_freed(self._ids, len(self._ids))
        return [*self._ids[:n], *(self.freed() if n == len(self._ids) else ())]

    def pin(self, start: int, size: int) -> int:
        return self._lib.simgpu_pin(_PTR(start), _PTR(size))

    def is_pinned(self, address: int) -> bool:
        """Whether the memory is locked; `Tensor.is_pinned` asks for the first byte of the storage."""
        return bool(self._lib.simgpu_is_pinned(_PTR(address)))

    def unpin(self, start: int) -> int:
        return self._lib.simgpu_unpin(_PTR(start))


_loaded: Library | None = None


def prepare() -> None:
    """Loads torch's C++ libraries and ours; torch itself must not be imported yet.

    Raises:
        NotBuilt: torch is imported, or ours does not compile.
    """
    global _loaded
    if _loaded is not None:
        return
    if "torch" in sys.modules:
        raise NotBuilt("torch has been imported already: simulated GPUs must be prepared before")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    _loaded = Library()


def lib() -> Library:
    if _loaded is None:
        raise NotBuilt("simulated GPUs were not prepared in this process")
    return _loaded


def answer(function: Callable[..., Any], failed: Any) -> Callable[..., Any]:
    """Returns ``function`` for C++ to call: what it raises is raised there."""

    def called(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:
            lib().error(str(error))
            return failed

    return called
