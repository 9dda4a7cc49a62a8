"""Tensors that lie in files: written without costing memory, and read where needed (layer T)."""

from __future__ import annotations

import math
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["empty_in_file", "is_local", "load_mapped", "save_streamed"]

SMALL_BYTES = 1 << 16
"""Smaller tensors stay in memory: a file each would cost more."""


def empty_in_file(
    shape: torch.Size, dtype: torch.dtype, folder: str | os.PathLike[str] | None = None
) -> Tensor:
    """Returns a new CPU tensor whose memory is a file that nobody else sees.

    The file has lost its name already, so it is gone with the tensor, also when the process is killed. The system
    writes pages back and takes their memory when it needs it. Small tensors are plain ones.

    Args:
        shape, dtype: of the tensor.
        folder: for the file; must be on a disk to save memory. None: the system's folder for temporary files.

    Raises:
        OSError: no space, or no such folder.
    """
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes < SMALL_BYTES or os.name != "posix":
        return torch.empty(shape, dtype=dtype)
    handle, path = tempfile.mkstemp(prefix=".tensor-", dir=folder)
    try:
        # A file with holes would end the process when the disk is full; this raises now.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size_bytes)
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size_bytes)
    finally:
        os.close(handle)
        os.unlink(path)
    assert isinstance(storage, torch.UntypedStorage)
    flat: Any = torch.empty(0, dtype=dtype)
    return flat.set_(storage, 0, shape)


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of this machine's file system, not a URL such as ``s3://...``."""
    return "://" not in str(path) and "::" not in str(path)


def save_streamed(checkpoint: Any, path: str | os.PathLike[str]) -> None:
    """Writes a local checkpoint tensor by tensor; the file appears when it is complete.

    The same as Lightning's own `TorchCheckpointIO` writes, which collects the whole file in memory first, twice: of a
    pipeline that is the whole model and its optimizer, for which no rank need have room.

    Args:
        checkpoint: anything that `torch.save` takes.
        path: of the file; folders are made. An old file is replaced; whoever has mapped it keeps the old contents.

    Raises:
        OSError: no space, or the folder cannot be written to; an old file is still there then.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(checkpoint, file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def load_mapped(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any] | None:
    """Loads a checkpoint whose tensors stay in its file until they are read.

    So each rank can take its part of a whole model's checkpoint. Writing to the tensors changes nothing on disk. Copy
    what is kept: the file may be overwritten.

    Args:
        path: of the checkpoint.
        weights_only: as in `torch.load`; None: torch's default.

    Returns:
        The checkpoint, on the CPU; None if that is not possible: no local file, or not as `torch.save` writes it.

    Raises:
        pickle.UnpicklingError: as `torch.load`, e.g. it holds more than weights.
    """
    local = Path(path)
    if not local.is_file() or not zipfile.is_zipfile(local):
        return None
    options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
    return torch.load(local, map_location="cpu", mmap=True, **options)
