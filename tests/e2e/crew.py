"""Ranks that a test starts one by one, over the same port, and gates at which they wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.e2e.stale.scripts import Ended, Process, collect, start_rank
from tests.ports import free_port

PATIENCE_S = 90.0


class Crew:
    """Processes; a gate lets one wait until it is told to go on."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, Process] = {}
        (folder / "client.py").write_text(script)

    def start(self, name: str, rank: int, **asked: Any) -> None:
        output = self.folder / f"said {name}"
        asked = {"ranks": 3, **asked}
        self.processes[name] = start_rank(self.folder, rank, output, port=self.port, script="client.py", **asked)

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"never: {what}\n{self.end(0.0)}")
            time.sleep(0.02)

    def at(self, gate: str) -> None:
        self.until(f"somebody at {gate}", (self.folder / f"at {gate}").exists)

    def go(self, gate: str) -> None:
        self.at(gate)
        (self.folder / f"go {gate}").touch()

    def ended(self, name: str) -> None:
        self.until(f"the end of {name}", lambda: self.processes[name].poll() is not None)

    def asks(self, rank: int) -> None:
        """Waits until the rank asks in the store that is there now."""
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        self.until(f"rank {rank} asks", lambda: store.check([f"lightning_hetero/asks/{rank}"]))

    def end(self, limit_s: float = PATIENCE_S) -> dict[str, int]:
        """Waits for all; keeps what is left as `left`, and returns the exit codes."""
        outputs = [self.folder / f"said {name}" for name in self.processes]
        self.left: Ended = collect(self.folder, [*self.processes.values()], outputs, limit_s)
        return dict(zip(self.processes, self.left.code, strict=True))

    def said(self, name: str) -> str:
        return (self.folder / f"said {name}").read_text()
