"""What a training step cannot do because only the first rank of each group runs it (layer L)."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["add_hint", "within_limits"]

_OURS = str(Path(__file__).parents[2])
_LIBRARIES = sysconfig.get_path("purelib")
_NO_GRAPH = "to not have been used in the graph"  # torch's words, in torch.autograd.grad


@contextmanager
def within_limits(trainer: Trainer) -> Iterator[None]:
    """Refuses, in the body of a training step, what would happen on this rank only, or cannot happen.

    Raises:
        RuntimeError: the step has changed settings of an optimizer, which others have, too; or it differentiates
            through the backbone.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [group.copy() for group in groups]
    try:
        yield
    except RuntimeError as error:
        if _NO_GRAPH in str(error):
            add_hint(error)
        raise
    for index, (was, now) in enumerate(zip(before, groups, strict=True)):
        if was != now:  # what is the same object is not compared
            name = next(name for name, value in now.items() if name not in was or value != was[name])
            raise RuntimeError(
                f"training_step on rank {trainer.global_rank} has changed {name!r} of parameter group {index} from"
                f" {was.get(name)} to {now[name]}: in a pipeline only the first rank of each group runs it, and the"
                " optimizers of the others keep theirs. Change it in on_train_batch_start or by a scheduler that"
                " Lightning steps, or use strategy='hetero_balanced'"
            )


def add_hint(error: Exception) -> None:
    """Adds to an error of the user's step what may help; nothing, if it is no such error."""
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if _NO_GRAPH in str(error):
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
