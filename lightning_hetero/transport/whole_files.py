"""Files that appear when they are complete, and of a process that is killed meanwhile leave nothing (layer T).

    written      in a file without a name, where the file system has such; else in .<name>.<host>-<pid>.part
    complete     on disk, named .part, and renamed: an old file is there until the new one replaces it
    killed       the file without a name is gone; a named one is removed by whoever writes the same file next
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_NAMELESS: int = getattr(os, "O_TMPFILE", 0)
_HOST = socket.gethostname().replace(os.sep, "_")


def name_of_process() -> str:
    """Returns what tells this process from others that write to the same folder, perhaps on other hosts."""
    return f"{_HOST}-{os.getpid()}"


def remove_left(folder: str | os.PathLike[str], before: str, behind: str = "") -> None:
    """Removes the files that processes of this host have left which are gone.

    Args:
        folder: where they are.
        before, behind: their names, around `name_of_process` and what may come behind that.
    """
    left = re.compile(rf"{re.escape(f'{before}{_HOST}')}-(\d+)(-.*)?{re.escape(behind)}")
    for name in os.listdir(folder):
        if found := left.fullmatch(name):
            try:
                os.kill(int(found[1]), 0)
            except ProcessLookupError:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))
            except OSError:  # it lives, and is somebody else's
                pass


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Inside, a local file is written; afterwards it is on disk and has replaced an old one.

    Args:
        path: of the file; folders are made. Where an old file is mapped, the old contents stay.

    Raises:
        OSError: no space, or the folder cannot be written to; an old file is still there then.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{name_of_process()}.part")
    remove_left(target.parent, f".{target.name}.", ".part")
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        nameless = _without_name(target.parent)
        with part.open("wb") if nameless is None else os.fdopen(nameless, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if nameless is not None:
                part.unlink(missing_ok=True)
                os.link(f"/proc/self/fd/{nameless}", part.name, src_dir_fd=folder, dst_dir_fd=folder)
        part.replace(target)
        os.fsync(folder)
    finally:
        os.close(folder)
        part.unlink(missing_ok=True)


def _without_name(folder: Path) -> int | None:
    """Returns the descriptor of a new file that has no name and can be given one; None: there is no such file here."""
    if not _NAMELESS or not os.path.exists("/proc/self/fd"):
        return None
    with suppress(OSError):  # such as NFS
        return os.open(folder, os.O_WRONLY | _NAMELESS, 0o666)
    return None
