"""Lightning's distributed checkpoints: folders in which each rank has written its shards (layer L).

Private: ``_METADATA_FILENAME``, the file that Lightning writes last, and what torch reads a whole folder with. Both are
pinned by `tests/ranks/sharded/test_folders.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def written_last(folder: Any) -> Path:
    """Returns the file that makes a folder a checkpoint."""
    return Path(folder) / _METADATA_FILENAME


def remove(*paths: Path) -> None:
    """Removes folders, files and links, where there are any."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_folder(folder: Any, weights_only: bool | None = None) -> dict[str, Any]:
    """Returns the checkpoint that a file would hold, in the memory of this process. Not a collective."""
    checkpoint: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(checkpoint, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    states = []
    while (name := f"optimizer_{len(states)}") in checkpoint:
        states.append({"state": {}, **checkpoint.pop(name)})
    rest = torch.load(written_last(folder), map_location="cpu", weights_only=weights_only)
    return {**rest, **checkpoint, **({"optimizer_states": states} if states else {})}
