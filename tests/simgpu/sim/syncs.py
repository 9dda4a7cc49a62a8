"""Host synchronisations, counted by place, and how places are told."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from types import FrameType

_OURS = "/lightning_hetero/"
_BETWEEN = "/lightning_hetero/measure/device.py"  # tells nothing: everybody asks it
_THEIRS = ("/lightning/", "/torch/nn/parallel/", "/torch/optim/", "/torch/amp/", "/tests/")


def place() -> str:
    """Returns the innermost place of the package, else of Lightning, of a known part of torch, or of a test."""
    found, other = "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _OURS in name and "/tests/" not in name and not name.endswith(_BETWEEN):
            return _told(frame, name.rpartition(_OURS)[2])
        if "/tests/simgpu/sim/" not in name:
            if not found and any(part in name for part in _THEIRS):
                found = _told(frame, "/".join(name.split("/")[-3:]))
            elif not other and "/torch/" not in name:
                other = _told(frame, name.rpartition("/")[2])
        frame = frame.f_back
    return found or other


def _told(frame: FrameType, name: str) -> str:
    return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"


class Syncs:
    """What had the host wait for a device, while `counting`.

    Attributes:
        counting: whether to count now.
        found: how often, by (kind, place), in the threads that train: Python's first and autograd's.
        beside: the same in threads of the package's own, which wait while others train.
    """

    def __init__(self) -> None:
        self.counting = False
        self.found: Counter[tuple[str, str]] = Counter()
        self.beside: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str) -> None:
        if self.counting:
            thread = threading.current_thread()
            trains = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
            (self.found if trains else self.beside)[kind, place()] += 1


syncs = Syncs()
