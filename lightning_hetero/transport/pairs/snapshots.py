"""Published parameters for slow readers: each version stays whole until the last has read it (layer T)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_hetero.transport.seqlock import check_flat, copy_bytes, cores

__all__ = ["Snapshots"]


class Snapshots:
    """Buffers of ``data_bytes``; as many as are being read, and one or two more. Thread-safe."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._newest: _Snapshot | None = None

    def publish(self, version: int, parameters: Tensor) -> None:
        """Makes a copy of ``parameters`` (uint8, data_bytes) the newest version."""
        check_flat("parameters", parameters, self._data_bytes)
        with self._lock:
            buffer = self._free.pop() if self._free else torch.empty(self._data_bytes, dtype=torch.uint8)
        copy_bytes(buffer, parameters, cores())
        with self._lock:
            old, self._newest = self._newest, _Snapshot(version, buffer)
            if old is not None:
                self._let_go(old)

    @property
    def version(self) -> int:
        """The newest version, -1 before the first."""
        newest = self._newest
        return -1 if newest is None else newest.version

    @contextlib.contextmanager
    def borrow(self) -> Iterator[tuple[int, Tensor | None]]:
        """Lends the newest version and its bytes, not to be written; (-1, None) before the first."""
        with self._lock:
            snapshot = self._newest
            if snapshot is not None:
                snapshot.holders += 1
        try:
            yield (-1, None) if snapshot is None else (snapshot.version, snapshot.data)
        finally:
            if snapshot is not None:
                with self._lock:
                    self._let_go(snapshot)

    def _let_go(self, snapshot: _Snapshot) -> None:
        snapshot.holders -= 1
        if snapshot.holders == 0:
            self._free = [snapshot.data]  # one spare is enough: publishing is done by one thread


class _Snapshot:
    def __init__(self, version: int, data: Tensor) -> None:
        self.version, self.data = version, data
        self.holders = 1  # being the newest counts as one
