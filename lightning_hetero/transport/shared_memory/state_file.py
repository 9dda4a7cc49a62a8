"""The server's state as a file of its folder; where that has no room, in another place that has (layer T).

    /dev/shm/lightning-hetero-1000-ab12cd34/state     bytes, or a link to ...
    /tmp/lightning-hetero-1000-ef56gh78/state         ... these, in a folder of the same kind

The shared memory of a container, often 64 MiB, may hold slots and parameters and yet not the state of their optimizers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lightning_hetero.transport.shared_memory.directory import (
    STATE,
    make_directory,
    places,
    remove_directory,
    replace_file,
)

__all__ = ["StateFile"]


class StateFile:
    """What a server shares.

    Args:
        folder: the server's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._other: tuple[Path, int] | None = None  # a folder elsewhere, and its lock

    def write(self, data: bytes) -> None:
        """Replaces the state.

        Raises:
            OSError: there is no room anywhere; the last state may be gone.
        """
        refusals: list[str] = []
        for place in (self._folder.parent, *(p for p in places() if p != self._folder.parent)):
            try:
                self._write_in(place, data)
                return
            except OSError as error:
                refusals.append(f"{place}: {error.strerror or error}")
        raise OSError(
            f"no room for the server's state, {len(data) / 2**20:.0f} MiB; tried {'; '.join(refusals)}."
            " Give a container more shared memory (docker: --shm-size), or set TMPDIR to a folder with room"
        )

    def _write_in(self, place: Path, data: bytes) -> None:
        own = self._folder / STATE
        if place != self._folder.parent:
            target = self._elsewhere(place) / STATE
            replace_file(target, data)
            own.unlink(missing_ok=True)
            os.symlink(target, own)
            return
        try:
            replace_file(own, data)
        except OSError:
            own.unlink(missing_ok=True)  # room for two is not needed: who asked for the last one has read it
            replace_file(own, data)
        self.close()

    def _elsewhere(self, place: Path) -> Path:
        if self._other is None or self._other[0].parent != place:
            self.close()
            self._other = make_directory(place, {})
        return self._other[0]

    def close(self) -> None:
        """Removes what lies elsewhere; idempotent."""
        other, self._other = self._other, None
        if other is not None:
            remove_directory(other[0])
            with contextlib.suppress(OSError):
                os.close(other[1])
