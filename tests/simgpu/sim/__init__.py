"""Simulated GPUs: tensors that torch takes for CUDA's, on a torch without CUDA.

What is real: torch's dispatcher, autograd engine, DDP reducer, c10d, gloo, Lightning and all of `torch.cuda` that is
Python. What is simulated: memory (`native/device.cpp`: the host's, at addresses that nobody can use), kernels
(`kernels.py`: the host's, at once), order (`order.py`: streams and events as vector clocks), NCCL (`nccl.py`: its
rules, carried out by gloo).

    prepare()                       # before torch is imported
    install(gpus=2)                 # after: this process has two GPUs

What raises: operands on several devices, memory of the device used on the host, the device used after a fork, events on
other devices, and with ``asynchronous=True`` work that nothing orders (`races.py`); copies to the host that nobody
waits for deliver nothing. What is counted: host synchronisations, by place (`syncs.py`).

What it cannot show: times, what the kernels of a GPU compute (cuDNN, fused kernels, rounding), CUDA graphs, Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simgpu.sim.build import NotBuilt, why_not
from tests.simgpu.sim.native import prepare

if TYPE_CHECKING:
    from tests.simgpu.sim.check import Entry

__all__ = ["NotBuilt", "finish", "found", "install", "prepare", "why_not"]


def install(gpus: int, *, asynchronous: bool = True, nccl: bool = False, serial: bool = False) -> None:
    """Gives this process simulated GPUs; once per process, and after `prepare`.

    Args:
        gpus: how many.
        asynchronous: copies deliver late, and unordered work raises.
        nccl: ``"nccl"`` is a backend, with NCCL's rules.
        serial: kernels of all communicators of a device run one after the other.
    """
    from tests.simgpu.sim import collectives, cuda, kernels, order, replaced
    from tests.simgpu.sim import nccl as communicators

    order.start(asynchronous)
    kernels.install()
    collectives.install()
    cuda.install(gpus)
    replaced.install()
    if nccl:
        communicators.install(serial)


def finish() -> None:
    """Lets all devices do their work to its end, so that what is still under way is looked at.

    Raises:
        RuntimeError: there is a race.
    """
    import torch

    for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.synchronize(device)


def found() -> tuple[list[str], list[Entry]]:
    """Returns the races that were found, and what was issued to communicators with NCCL's rules."""
    from tests.simgpu.sim import nccl, order

    return order.order().races, nccl.entries
