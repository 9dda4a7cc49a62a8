"""The faults that happen inside the program of the fault matrix, where and when it is told."""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from torch import nn

from tests.faults import asked
from tests.faults.asked import ASKED, my_rank, note, pids

CALLS, FIRED = [0], [False]
NOW = {"slow": False, "nan": False, "out of memory": False}
FROM_OUTSIDE = ("cut", "stop all", "kill all", "strangers")  # by the observer
_POLL_S = 0.01
_WRITTEN_BYTES = 2048


def here(place: str, **of: Any) -> None:
    """Lets the fault happen if it is due here and now.

    Args:
        of: what the fault may need to get hold of.
    """
    if not ASKED["kind"] or place != ASKED["place"] or FIRED[0] or my_rank() not in ASKED["ranks_hit"]:
        return
    CALLS[0] += 1
    if CALLS[0] < ASKED["call"]:
        return
    FIRED[0] = True
    kind = ASKED["kind"]
    pid = server().pid if kind == "stop the server" else os.getpid()
    note("happened.jsonl", at_s=time.time(), rank=my_rank(), pid=pid, place=place)
    happen(kind, **of)


def happen(kind: str, **of: Any) -> None:
    me = os.getpid()
    if kind == "exception":
        raise RuntimeError(asked.CAUSE)
    if kind == "kill":
        os.kill(me, signal.SIGKILL)
    elif kind == "kill soon":  # where it will be then
        killer = threading.Timer(ASKED["hold_s"], os.kill, (me, signal.SIGKILL))
        killer.daemon = True
        killer.start()
    elif kind == "kill in a write":  # the next file that grows beyond this
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores
        resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    elif kind == "kill together":  # the first of them kills all
        for pid in pids(ASKED["ranks_hit"]):
            os.kill(pid, signal.SIGKILL)
    elif kind == "kill the server":
        server().kill()
    elif kind == "stop the server":
        server().suspend()
    elif kind == "hang":
        while True:
            time.sleep(_POLL_S)
    elif kind in ("SIGTERM", "SIGUSR1"):
        os.kill(me, getattr(signal, kind))
    elif kind in ("SIGTERM to all", "SIGUSR1 to all"):
        for pid in pids(range(ASKED["ranks"])):
            os.kill(pid, getattr(signal, kind.split()[0]))
    elif kind == "stop":
        os.kill(me, signal.SIGSTOP)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "hold the GIL":
        holds = threading.Thread(target=ctypes.PyDLL(None).sleep, args=(int(ASKED["hold_s"]),))
        holds.start()
    elif kind in NOW:
        NOW[kind] = True
    elif kind == "fill the disk":
        fill(asked.FOLDER / "small")
        if ASKED["hold_s"]:  # then there is room again
            threading.Timer(ASKED["hold_s"], os.unlink, (asked.FOLDER / "small" / "filler",)).start()
    elif kind == "fill /dev/shm":
        fill(Path("/dev/shm"))
    elif kind in CHANGES:
        CHANGES[kind](of["module"])
    elif kind in FROM_OUTSIDE:
        while kind != "cut" and not (asked.FOLDER / "acted").exists():  # the training would be over too soon
            time.sleep(_POLL_S)
    else:
        raise AssertionError(f"no such fault: {kind}")


def server() -> psutil.Process:
    """Returns the stale engine's server; asked in rank 0."""
    (found,) = [child for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]
    return found


def fill(folder: Path) -> None:
    """Leaves no room there; the observer has put a small file system of its own in this place."""
    for size in (1 << 16, 1 << 9, 1):
        try:
            with open(folder / "filler", "ab", buffering=0) as file:
                while True:
                    file.write(b"x" * size)
        except OSError:
            pass


# ---- changes of the module ------------------------------------------------------------------------------------------


class Spy(nn.Module):
    """Stands for a layer, and notes when it is called; the parameters are the layer's."""

    layer: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.linear = layer.linear
        self.__dict__["layer"] = layer  # not a submodule: the names stay

    def forward(self, x: Any) -> Any:
        note("spied.jsonl", rank=my_rank())
        return self.layer(x)


def _grow(module: Any) -> None:
    module.late = nn.Linear(2, 2).to(module.net[0].weight.dtype)


def _wrap(module: Any) -> None:
    module.net[1] = Spy(module.net[1])


def _replace(module: Any) -> None:
    module.net[1] = copy.deepcopy(module.net[1])


CHANGES = {"add a submodule": _grow, "wrap a layer": _wrap, "replace a layer": _replace}


def hooked(*classes: type) -> None:
    """Wraps the one method that is the place of the fault; others stay as they are, overridden or not."""
    for cls in classes:
        owner, _, name = ASKED["place"].partition(".")
        if owner == cls.__name__:
            original = getattr(cls, name)

            @functools.wraps(original)
            def wrapper(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                here(ASKED["place"], module=self)
                return original(self, *args, **kwargs)

            wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
            del wrapper.__wrapped__  # through which Lightning would see that nothing was overridden
            setattr(cls, name, wrapper)
