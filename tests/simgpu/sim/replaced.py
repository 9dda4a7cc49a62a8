"""The few functions of torch and Lightning that are replaced on simulated GPUs, each with the reason; none of ours."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.simgpu.sim.order import order


def _storage(size: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()


def install() -> None:
    """Replaces them in this process."""
    _storages()
    _parameters_of_ddp()


def _storages() -> None:
    plain_clone = torch.UntypedStorage.clone

    def clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
        # Copies of a tensor (`copy.deepcopy`) ask for a storage on the device, which is compiled in only with CUDA.
        if self.device.type != "cuda":
            return plain_clone(self)
        return _storage(self.nbytes(), self.device).copy_(self)

    torch.UntypedStorage.clone = clone

    def to_device(storage: Any, location: str) -> Any:
        # So does `torch.load` for what was on a device.
        if not location.startswith("cuda"):
            return None
        device = torch.device(location)
        return _storage(storage.nbytes(), device).copy_(storage)

    torch.serialization.register_package(5, lambda storage: None, to_device)


def _parameters_of_ddp() -> None:
    # Lightning makes DDP, which hands out the parameters, on a side stream for which nothing waits: a race of its own,
    # which every fit would report. (Patched in torch, because Lightning may not be imported yet.)
    from torch.nn.parallel import DistributedDataParallel

    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.device_ids:
            order().host_waits_for_device(torch.cuda.current_device())

    DistributedDataParallel.__init__ = init
