"""A step that a leader runs, for which rank and without the others: what it may ask of them (layer L)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.transport.alone import run_alone

__all__ = ["acting_as", "acting_rank", "leader_runs", "rank_zero_acts"]

_ACTS: ContextVar[int | None] = ContextVar("acts", default=None)  # each suspended step has a context of its own


@contextmanager
def acting_as(rank: int) -> Iterator[None]:
    """Inside, this process runs a step as ``rank`` would under DDP; 0 is the only one that prints and draws."""
    token = _ACTS.set(rank)
    try:
        yield
    finally:
        _ACTS.reset(token)


def acting_rank() -> int | None:
    """Returns the rank for which a step runs here; None: none does."""
    return _ACTS.get()


def leader_runs(step: str) -> AbstractContextManager[None]:
    """Inside, which is the body of a user's step, communication with other ranks is refused: they do not run it.

    Args:
        step: name of the module's method.
    """
    return run_alone(
        f"in {step}, but in a pipeline only the first rank of each group runs it: the others would never take part."
        " self.log(..., sync_dist=True) and torchmetrics work in it, and on_train_batch_end and the hooks at the end of"
        " an epoch run on all ranks; or use strategy='hetero_balanced'"
    )


def rank_zero_acts(rank: int) -> AbstractContextManager[None]:
    """Inside, what is decorated with ``rank_zero_only`` is executed where a step runs for rank 0.

    Args:
        rank: this process.
    """
    return patched(rank_zero_only, "rank", _Rank(rank))


class _Rank(int):
    """The number in ``rank_zero_only.rank``, which is compared with 0."""

    def __eq__(self, other: Any) -> bool:
        acts = _ACTS.get()
        return int(self if acts is None else acts) == other

    __hash__ = int.__hash__

    def __gt__(self, other: Any) -> bool:  # a logger asks so before it opens its files
        acts = _ACTS.get()
        if acts == 0 and int(self) != 0:
            raise RuntimeError(
                f"logger.experiment is open on rank 0 only, and in this pipeline rank {int(self)} runs this step: log"
                " with self.log, or use the experiment in on_train_batch_end; or pass a plan= whose first group begins"
                " with rank 0, or use strategy='hetero_balanced'"
            )
        return int(self if acts is None else acts) > other
