"""gloo with tensors of the device: torch without CUDA has no such part; it works on their aliases on the host.

On a GPU gloo copies to the host and back on streams of its own, for which the current stream waits. Here the operation
is one piece of work of the current stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.simgpu.sim.kernels import Operands, current
from tests.simgpu.sim.races import uses

_NAMES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "allgather_into_tensor_coalesced_", "allgather_coalesced_", "gather_", "scatter_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send", "recv_",
    "recv_any_source_", "barrier",
)  # fmt: skip


def _on_aliases(op: Any) -> Callable[..., Any]:
    @torch._disable_dynamo
    def called(*args: Any, **kwargs: Any) -> Any:
        operands = Operands(op)
        near_args = [operands.positional(i, x) for i, x in enumerate(args)]
        near_kwargs = {name: operands.named(name, x) for name, x in kwargs.items()}
        if operands.device is not None:
            written = [(x, True) for x, _ in operands.used]  # schemas of collectives do not say which
            uses(written, current(operands.device), operands.name)
        return operands.result(op(*near_args, **near_kwargs))

    return called


_library: torch.library.Library | None = None


def install() -> None:
    """Registers the collectives for tensors of the device."""
    global _library
    import torch.distributed  # defines them

    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has registered them, too: they would ask gloo for CUDA
        for name in _NAMES:
            op = getattr(torch.ops.c10d, name).default
            _library.impl(name, _on_aliases(op), "CUDA")
