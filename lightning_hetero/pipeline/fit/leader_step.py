"""A step that a leader runs, for which rank and without the others: what it may do and ask of them (layer L)."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer

from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.transport.alone import run_alone

_ACTS: ContextVar[tuple[int, str] | None] = ContextVar("acts", default=None)  # each suspended step has its own context


@contextmanager
def acting_as(rank: int, step: str) -> Iterator[None]:
    """Inside, which is the body of a user's step, this process runs it as ``rank`` would under DDP, and alone.

    Rank 0 is the only one that prints and draws.

    Args:
        rank: for which the step runs.
        step: name of the module's method.
    """
    token = _ACTS.set((rank, step))
    try:
        with leader_runs(step):
            yield
    except RuntimeError as error:
        if NO_GRAPH in str(error):
            add_hint(error)
        raise
    finally:
        _ACTS.reset(token)


def acting_rank() -> int | None:
    """Returns the rank for which a step runs here; None: none does."""
    acts = _ACTS.get()
    return None if acts is None else acts[0]


def acting_step() -> str | None:
    """Returns the name of the step that runs here; None: none does."""
    acts = _ACTS.get()
    return None if acts is None else acts[1]


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
        acts = acting_rank()
        return int(self if acts is None else acts) == other

    __hash__ = int.__hash__

    def __gt__(self, other: Any) -> bool:  # a logger asks so before it opens its files
        acts = acting_rank()
        if acts == 0 and int(self) != 0:
            raise RuntimeError(
                f"logger.experiment is open on rank 0 only, and in this pipeline rank {int(self)} runs this step: log"
                " with self.log, or use the experiment in on_train_batch_end; or pass a plan= whose first group begins"
                " with rank 0, or use strategy='hetero_balanced'"
            )
        return int(self if acts is None else acts) > other


@contextmanager
def same_settings(trainer: Trainer) -> Iterator[None]:
    """Refuses changes that training steps make to optimizers of which other ranks have their own; inside is a batch.

    Raises:
        RuntimeError: a step has changed settings of an optimizer.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [group.copy() for group in groups]
    yield
    for index, (was, now) in enumerate(zip(before, groups, strict=True)):
        if was != now:  # what is the same object is not compared
            name = next(name for name, value in now.items() if name not in was or value != was[name])
            raise RuntimeError(
                f"training_step on rank {trainer.global_rank} has changed {name!r} of parameter group {index} from"
                f" {was.get(name)} to {now[name]}: in a pipeline only the first rank of each group runs it, and the"
                " optimizers of the others keep theirs. Change it in on_train_batch_start or by a scheduler that"
                " Lightning steps, or use strategy='hetero_balanced'"
            )


# ---- what may help with its errors ------------------------------------------------------------------------------

NO_GRAPH = "to not have been used in the graph"
"""Torch's words, of torch.autograd.grad."""

_OURS = str(Path(__file__).parents[2])
_LIBRARIES = sysconfig.get_path("purelib")


def add_hint(error: Exception) -> None:
    """Adds to an error of the user's step what may help; nothing, if it is no such error."""
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if NO_GRAPH in str(error):
        hint = (
            "In a pipeline the backbone's layers are on several ranks, so torch.autograd.grad cannot go through it,"
            " neither to its input nor to its parameters; use strategy='hetero_balanced'"
        )
    elif not files[-1].startswith(_OURS) and any(not name.startswith((_OURS, _LIBRARIES)) for name in files):
        hint = (
            "In a pipeline training_step is tried before training, when on_fit_start, on_train_start and"
            " on_train_epoch_start have not run: make what it needs in __init__, setup or configure_model; or say"
            " plan=, or use strategy='hetero_balanced'"
        )
    else:
        return
    error.args = (f"{str(error).rstrip('.')}. {hint}",)
