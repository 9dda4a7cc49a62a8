"""Devices, in one place (layer T).

Nothing else in the package asks for a device's type: it takes `device_of(device)` and calls the methods of its kind,
see `lightning_hetero.measure.kinds`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_hetero.measure.kinds import Accelerator, Cuda, HostDevice
from lightning_hetero.measure.kinds import Stamp as Stamp

# What is printed if memory is short and no torch.OutOfMemoryError tells. NOT_INITIALIZED and INTERNAL_ERROR may mean
# something else as well: they are what cuBLAS and cuDNN say if there is no room for their handle or workspace.
_OUT_OF_MEMORY = (
    "out of memory",  # torch on behalf of the driver ("CUDA error: out of memory"), NCCL ("Cuda failure 2 'out of ...")
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUFFT_ALLOC_FAILED",
)

_HOST = HostDevice(torch.device("cpu"))
# Apple's GPU is one per machine, and Lightning refuses it under every strategy of several processes.
_KINDS: dict[str, type[HostDevice]] = {**dict.fromkeys(("cpu", "meta", "mps"), HostDevice), "cuda": Cuda}


@lru_cache(maxsize=64)
def _device(device: torch.device) -> HostDevice:
    return _KINDS.get(device.type, Accelerator)(device)


def device_of(device: torch.device | str) -> HostDevice:
    """Returns what the device can do; one without a number is the current one of its kind when it is used."""
    return _device(torch.device(device))


def page_locked(batch: Any) -> Any:
    """Returns a batch as a loader with ``pin_memory`` does: page-locked, if there is a device to copy it to."""
    return pin_memory(batch) if torch.accelerator.is_available() else batch


@lru_cache(maxsize=1)
def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator()


def device_in_use() -> HostDevice:
    """Returns the current device of the accelerator that this process uses; the host if it uses none."""
    known = _accelerator()
    if known is None:
        return _HOST
    module: Any = torch.get_device_module(known)
    if not getattr(module, "is_initialized", lambda: True)():
        return _HOST
    return device_of(torch.device(known.type, torch.accelerator.current_device_index()))


def save_random_states(device: HostDevice) -> Callable[[], None]:
    """Returns what puts the random generators back as they are now: Python's, NumPy's, torch's and the device's."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    on_device = device.random_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(host)
        device.set_random_state(on_device)

    return put_back


@contextmanager
def nothing_drawn(device: HostDevice | None = None) -> Iterator[None]:
    """Inside, random numbers are drawn without effect on later ones: from torch (CPU, device), `random` and NumPy.

    Args:
        device: None: the current one of an accelerator that is in use.
    """
    put_back = save_random_states(device_in_use() if device is None else device)
    try:
        yield
    finally:
        put_back()


def save_generator(generator: Any, at: Any) -> Callable[[], Any] | None:
    """Returns what gives a generator of random numbers the state that ``at`` has now; None: it is no generator."""
    if isinstance(generator, torch.Generator):
        return partial(generator.set_state, at.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, at.getstate())
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, at.get_state())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", at.bit_generator.state)
    return None


def autocast_kinds() -> tuple[str, ...]:
    """Returns the types of devices whose autocast a script may set: CUDA's also on machines without."""
    known = _accelerator()
    return tuple(dict.fromkeys(["cpu", "cuda", *([] if known is None else [known.type])]))


def accelerators() -> list[torch.device]:
    """Returns the accelerators that this process sees."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if kind is None else [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]


def wheel_architectures() -> tuple[str, ...]:
    """Returns for which of CUDA's architectures torch's wheel has code, e.g. ``("sm_80", "compute_90")``."""
    return tuple(torch.cuda.get_arch_list()) if torch.version.cuda else ()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, cuBLAS, cuDNN, NCCL or the driver says that memory was short."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def no_device_in_this_process() -> None:
    """Has torch say that there is no device, in a process that was forked after its parent had used one.

    CUDA may not be used in such a process, but torch goes on saying that it is there, because it has counted the
    devices before the fork; `torch.optim` (from its check for graph capture), optimizers and schedulers of users ask.
    """
    gone = {"is_available": lambda: False, "device_count": lambda: 0}
    for module in (torch.accelerator, torch.cuda, torch.xpu):
        for name, answer in gone.items():
            setattr(module, name, answer)
    torch.accelerator.current_accelerator = lambda check_available=False: None
    _accelerator.cache_clear()
