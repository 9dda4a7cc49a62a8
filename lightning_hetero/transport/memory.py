"""What a server and its workers share: a folder of mapped files, removed when its server is gone (layer T).

    lightning-hetero-1000-ab12cd34/   0700
        lock          locked (flock) as long as a process of the server lives
        control       unix socket
        parameters    words and two buffers, see `ParameterArea`
        slot-<rank>   sequence word and gradients, see `Slot`

Workers elsewhere have no file: the server keeps a copy of their slot in memory of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_hetero.transport.seqlock import ParameterArea, Slot

_PREFIX = f"lightning-hetero-{os.getuid()}-"
_MEMORY = Path("/dev/shm")
_UNLOCKED_S = 60.0  # a folder without a lock file may be one being made right now


def _places() -> Iterator[Path]:
    """Where such folders may lie, best first: memory, the user's run folder, the temporary one."""
    named = [_MEMORY, *(Path(v) for v in [os.environ.get("XDG_RUNTIME_DIR")] if v), Path(tempfile.gettempdir())]
    for place in dict.fromkeys(named):
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
            yield place


def _make_directory(place: str | os.PathLike[str] | None, files: Mapping[str, int]) -> tuple[Path, int]:
    """Makes a folder with ``files`` (name -> bytes), zeroed and with their room reserved.

    Folders of dead servers of the same user are removed on the way.

    Args:
        place: the folder to make it in; None: the first with enough room of /dev/shm, XDG_RUNTIME_DIR and the
            temporary folder.

    Returns:
        The folder and the open, locked lock file.

    Raises:
        OSError: it cannot be made, or there is no room.
    """
    refusals: list[str] = []
    for candidate in _places() if place is None else [Path(place)]:
        _remove_stale_in(candidate)
        try:
            return _make_in(candidate, files)
        except OSError as error:
            refusals.append(f"{candidate}: {error.strerror or error}")
    needed_bytes = sum(files.values())
    raise OSError(
        f"no room for the server's shared memory, {needed_bytes / 2**20:.0f} MiB; tried {'; '.join(refusals)}."
        " Give a container more shared memory (docker: --shm-size), or name another folder"
    )


def _make_in(place: Path, files: Mapping[str, int]) -> tuple[Path, int]:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))  # 0700
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for name, size_bytes in files.items():
                _reserve(folder / name, size_bytes)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def _reserve(path: Path, size_bytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)  # a full disk must fail here, not as SIGBUS in a worker
        else:
            os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)


def _map_file(path: Path, size_bytes: int) -> Tensor:
    """Returns a file's memory as uint8 (size_bytes,), shared with every process that maps it; keeps no descriptor.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it has another size.
    """
    if (found := path.stat().st_size) != size_bytes:
        raise ValueError(f"{path.name} has {found} bytes, not {size_bytes}: made by another version?")
    return torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)


def map_slot(folder: Path, rank: int, slot_bytes: int) -> Slot:
    """Returns a rank's slot; raises as `_map_file`."""
    return Slot(_map_file(folder / f"slot-{rank}", Slot.size(slot_bytes)), slot_bytes)


def map_parameters(folder: Path, parameter_bytes: int) -> ParameterArea:
    """Returns the parameters; raises as `_map_file`."""
    return ParameterArea(_map_file(folder / "parameters", ParameterArea.size(parameter_bytes)), parameter_bytes)


def _remove_stale_in(place: Path) -> None:
    with contextlib.suppress(OSError):
        for folder in place.glob(_PREFIX + "*"):
            with contextlib.suppress(OSError):
                if folder.lstat().st_uid == os.getuid() and folder.is_dir() and _abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folder: Path, within_s: float = 0.2) -> None:
    """Removes a folder whose server was killed, which could not do so itself. One whose server lives is left alone.

    Args:
        folder: of a server that has been heard of.
        within_s: a process that ends lets go of its files one after another.
    """
    deadline_s = time.monotonic() + within_s
    with contextlib.suppress(OSError):
        while not (gone := _abandoned(folder, young_s=-math.inf)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        if gone:
            shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path, young_s: float = 1.0) -> bool:
    try:
        lock = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.lstat().st_mtime > _UNLOCKED_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A folder this young may have been opened between the making of its lock file and the lock.
        return time.time() - folder.lstat().st_mtime > young_s
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


class ServerMemory:
    """The server's end: slots and parameters, mapped at first use, so that a fork in between is safe.

    Args:
        directory: the folder to make the server's in; None: see the error of `_make_directory`.
        near: ranks that share this memory; none: there are no files.
        slot_bytes, parameter_bytes: sizes.

    Attributes:
        folder: of the files; None if there are none.
        state: what is told to workers that ask for the state.

    Raises:
        OSError: no room for the files.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, *, near: Iterable[int], slot_bytes: int, parameter_bytes: int
    ) -> None:
        self._near = frozenset(near)
        self.slot_bytes, self.parameter_bytes = slot_bytes, parameter_bytes
        self.folder: Path | None = None
        self.lock: int | None = None
        self.state = b""
        self._slots: dict[int, Slot] = {}
        self._parameters: ParameterArea | None = None
        if self._near:
            files = {f"slot-{rank}": Slot.size(slot_bytes) for rank in sorted(self._near)}
            files["parameters"] = ParameterArea.size(parameter_bytes)
            self.folder, self.lock = _make_directory(directory, files)

    def slot(self, rank: int) -> Slot:
        """Returns a worker's slot, or the copy of one that is elsewhere."""
        if (slot := self._slots.get(rank)) is None:
            if rank in self._near and self.folder is not None:
                slot = map_slot(self.folder, rank, self.slot_bytes)
            else:
                slot = Slot.empty(self.slot_bytes)
            self._slots[rank] = slot
        return slot

    def forget(self, rank: int) -> None:
        """A worker is gone: lets go of the copy of its slot."""
        if rank not in self._near:
            self._slots.pop(rank, None)

    @property
    def parameters(self) -> ParameterArea:
        """What is published."""
        if self._parameters is None:
            if self.folder is not None:
                self._parameters = map_parameters(self.folder, self.parameter_bytes)
            else:
                memory = torch.zeros(ParameterArea.size(self.parameter_bytes), dtype=torch.uint8)
                self._parameters = ParameterArea(memory, self.parameter_bytes)
        return self._parameters

    def remove(self) -> None:
        """Removes the files; what has been mapped stays usable. From any thread."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Lets go of all, without removing it; idempotent."""
        lock, self.lock = self.lock, None
        if lock is not None:
            os.close(lock)
        self._slots, self._parameters = {}, None
