"""A Python that has imported everything and never used a device: ranks on simulated GPUs are forks of it.

Started by `tests.simgpu.harness`; one request at a time: it forks the ranks, waits for them, and says how they ended.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

AFTERMATH_S = 5.0  # so long the others may go on after a rank has failed: they should notice
_POLL_S = 0.02


@dataclass
class Request:
    """What is to run.

    Attributes:
        call: pickled job and arguments.
        world: number of ranks.
        gpus: number of devices.
        nccl, asynchronous, serial: see `tests.simgpu.sim.install`.
        folder: where ranks write what came out, each its own ``result-R`` and ``screen-R``.
        port: for the ranks to meet.
        timeout_s: then all are ended.
        sys_path: of the caller.
        screen: ranks write to the caller's screen.
    """

    call: bytes
    world: int
    gpus: int
    nccl: bool
    asynchronous: bool
    serial: bool
    folder: str
    port: int
    timeout_s: float
    sys_path: list[str]
    screen: bool


def send(line: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    line.sendall(len(data).to_bytes(8, "little") + data)


def receive(line: socket.socket) -> object:
    """Returns the next message, None if the other side has gone."""
    size = _exactly(line, 8)
    if size is None:
        return None
    data = _exactly(line, int.from_bytes(size, "little"))
    return None if data is None else pickle.loads(data)


def _exactly(line: socket.socket, n: int) -> bytes | None:
    data = b""
    while len(data) < n:
        part = line.recv(n - len(data))
        if not part:
            return None
        data += part
    return data


def _ranks(request: Request, line: socket.socket) -> dict[int, int] | None:
    """Runs the ranks; returns their exit codes, None if nobody asks any more."""
    from tests.simgpu.rank_process import run_rank

    pids: dict[int, int] = {}
    for rank in range(request.world):
        pid = os.fork()
        if pid == 0:
            line.close()
            run_rank(rank, request)  # does not return
        pids[pid] = rank
    codes: dict[int, int] = {}
    deadline = time.monotonic() + request.timeout_s
    leave = Path(request.folder, "leave")
    while len(codes) < len(pids):
        ready, _, _ = select.select([line], [], [], _POLL_S)
        if ready:  # nobody says anything meanwhile: the caller has gone
            deadline = 0.0
        for pid in pids.keys() - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid]:
                    deadline = min(deadline, time.monotonic() + AFTERMATH_S)
        if not leave.exists() and all(Path(request.folder, f"result-{r}").exists() for r in range(request.world)):
            leave.touch()
        if time.monotonic() >= deadline:
            for pid in pids.keys() - codes.keys():
                os.killpg(pid, signal.SIGKILL)
        if ready and len(codes) == len(pids):
            return None
    for pid in pids:  # processes that a rank has started and left
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return {rank: codes[pid] for pid, rank in pids.items()}


def _serve(line: socket.socket) -> None:
    while isinstance(request := receive(line), Request):
        codes = _ranks(request, line)
        if codes is None:
            return
        send(line, codes)


if __name__ == "__main__":
    from tests.simgpu import sim

    sim.prepare()
    gc.disable()
    import torch._dynamo  # noqa: F401

    import tests.preload
    import tests.ranks.pipeline.kit
    import tests.simgpu.kit
    import tests.simgpu.rank_process
    import tests.simgpu.warm
    from tests.simgpu.sim import nccl  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.enable()
    tests.simgpu.warm._serve(socket.socket(fileno=int(sys.argv[1])))
