"""A step that one rank runs while the others do something else: it must not wait for them (layer T)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

_WHY: ContextVar[str | None] = ContextVar("why_a_rank_is_alone", default=None)
_MEETINGS = (
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "barrier", "monitored_barrier", "broadcast", "gather", "scatter", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "send", "recv", "recv_anysource",
)  # fmt: skip


@contextmanager
def run_alone(why: str) -> Iterator[None]:
    """Inside, which is the body of a user's step, communication with other ranks is refused, see `guard_groups`.

    Args:
        why: end of the error's sentence, "rank 1 communicates with other ranks (allreduce)": where, why not, what else.
    """
    token = _WHY.set(why)
    try:
        yield
    finally:
        _WHY.reset(token)


def guard_groups() -> Callable[[], None]:
    """Makes the collectives of all process groups raise where only one rank would call them; returns undo.

    Whatever a user calls, torch's functions or Lightning's, ends in a method of the group.
    """
    replaced = {name: vars(dist.ProcessGroup)[name] for name in _MEETINGS if name in vars(dist.ProcessGroup)}
    for name in replaced:
        setattr(dist.ProcessGroup, name, _guarded(getattr(dist.ProcessGroup, name)))

    def undo() -> None:
        for name, method in replaced.items():
            setattr(dist.ProcessGroup, name, method)

    return undo


def _guarded(method: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        why = _WHY.get()
        if why is not None and group.size() > 1:
            name = method.__name__.strip("_")
            raise RuntimeError(f"rank {dist.get_rank()} communicates with other ranks ({name}) {why}")
        return method(group, *args, **kwargs)

    return guarded
