"""A small disk, a small /dev/shm, two nodes with a cable between them: where the machine lets us make them.

Each is a namespace of the kernel's, held by a process that sleeps until it is killed; the program enters it by a path.
Nothing of it is seen by other processes of the machine, and it ends with its holder.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ADDRESSES = ("10.213.0.1", "10.213.0.2")
_WRONG = "02:00:00:00:00:99"  # of nobody


@cache
def why_not(needs: str) -> str:
    """Returns why this machine has no namespaces of this kind; empty: it has."""
    try:
        if needs == "mount":
            _run("unshare -m sh -c 'mount -t tmpfs -o size=1m tmpfs /mnt'")
        elif needs == "network":
            with network():
                pass
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"{needs} namespaces cannot be made here: {said.strip().splitlines()[-1]}"
    return ""


@dataclass(frozen=True)
class Disks:
    """Small file systems that only those who enter have.

    Attributes:
        namespaces: to enter.
        root: where the root folder that they see is to be found.
    """

    namespaces: list[str]
    root: str = ""

    def at(self, path: Path | str) -> Path:
        """Returns where a path of theirs is to be found."""
        return Path(f"{self.root}{path}")


@contextmanager
def small_disks(folder: Path, size_bytes: int = 4 << 20) -> Iterator[Disks]:
    """Puts file systems of their own at ``folder``/small and /dev/shm."""
    (folder / "small").mkdir()
    places = (folder / "small", "/dev/shm")
    mounts = [f"mount -t tmpfs -o size={size_bytes} tmpfs {shlex.quote(str(at))}" for at in places]
    with _held(["unshare", "-m", "sh", "-c", " && ".join(["mount --make-rprivate /", *mounts]) + _WAIT]) as pid:
        yield Disks([f"/proc/{pid}/ns/mnt"], f"/proc/{pid}/root")


class Network:
    """Two nodes with one cable between them.

    Attributes:
        pids: of the processes that hold the nodes.
        interface: what the cable's end is called on both.
    """

    interface = "cable"

    def __init__(self, pids: tuple[int, int]) -> None:
        self.pids = pids

    def namespace(self, node: int) -> str:
        return f"/proc/{self.pids[node]}/ns/net"

    def cut(self) -> None:
        """Loses every packet from now on, without a word to either side, as a partition does."""
        for node in (0, 1):
            self._on(node, f"ip neigh replace {ADDRESSES[1 - node]} lladdr {_WRONG} nud permanent dev {self.interface}")

    def restore(self) -> None:
        for node in (0, 1):
            self._on(node, f"ip neigh del {ADDRESSES[1 - node]} dev {self.interface}")

    def _on(self, node: int, command: str) -> None:
        _run(f"nsenter -t {self.pids[node]} -n {command}")


@contextmanager
def network() -> Iterator[Network]:
    """Makes two nodes, `ADDRESSES`, for as long as the block lasts."""
    node = ["unshare", "-n", "sh", "-c", "ip link set lo up" + _WAIT]
    with _held(node) as first, _held(node) as second:
        made = Network((first, second))
        name = made.interface
        made._on(0, f"ip link add {name} type veth peer name {name} netns {second}")
        for i, address in enumerate(ADDRESSES):
            made._on(i, f"ip address add {address}/24 dev {name}")
            made._on(i, f"ip link set {name} up")
        yield made


_WAIT = " && echo ready && exec cat"  # until its input is closed


@contextmanager
def _held(command: list[str]) -> Iterator[int]:
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )
    assert holder.stdout is not None and holder.stdin is not None
    try:
        if (said := holder.stdout.readline()) != "ready\n":
            raise OSError(said + holder.stdout.read())
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True, capture_output=True, text=True, cwd=os.sep)
