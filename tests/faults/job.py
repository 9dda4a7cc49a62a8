"""All processes of a job, also those that nobody started by hand: what meets a job as a whole meets them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.launchers import Started


@dataclass
class Job:
    """The processes of one job.

    Attributes:
        folder: where it works.
        started: the processes that were started by hand.
    """

    folder: Path
    started: Sequence[Started]
    _stopped: list[int] = field(default_factory=list)

    def pids(self) -> set[int]:
        """Returns all that run now: those started by hand, their children, and who else works in the folder."""
        mine = {one.process.pid for one in self.started if one.process.poll() is None}
        for pid in tuple(mine):
            with suppress(psutil.Error):
                mine |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(self.folder):
                mine.add(process.pid)
        return mine - {os.getpid()}

    def stop(self) -> None:
        """Stops all, so that none can do anything about what comes; a child that is born meanwhile, too."""
        seen: set[int] = set()
        while more := self.pids() - seen:
            _send(more, signal.SIGSTOP)
            seen |= more
        self._stopped = sorted(seen)

    def wake(self) -> None:
        """Wakes those that `stop` has stopped."""
        _send(self._stopped, signal.SIGCONT)

    def kill(self) -> list[str]:
        """Kills all at once; returns what they held of what may outlive them: files in memory, named sockets."""
        self.stop()
        held = [name for pid in self._stopped for name in [*_files(pid), *_sockets(pid)]]
        _send(self._stopped, signal.SIGKILL)
        return sorted(set(held))


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _files(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{file}"))
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found += [line.split(None, 5)[5] for line in maps if len(line.split(None, 5)) > 5]
    return [name for name in found if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")]


def _sockets(pid: int) -> list[str]:
    """Returns the names of its sockets that have one, in files or not ("@...")."""
    inodes = set()
    with suppress(OSError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{file}").removeprefix("socket:[").rstrip("]"))
    return [name for inode, name in unix_sockets() if inode in inodes]


def unix_sockets() -> list[tuple[str, str]]:
    """Returns inode and name of all sockets of this machine that have one."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [(row[6], row[7]) for row in rows if len(row) > 7]
