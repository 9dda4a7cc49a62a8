"""What may help with errors of a user's step in a pipeline (layer L)."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

__all__ = ["NO_GRAPH", "add_hint"]

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
